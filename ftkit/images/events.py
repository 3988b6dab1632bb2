"""Progress of long steps and transfers, and retries."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ftkit.errors import ImageError

ResultT = TypeVar("ResultT")
RETRY_SECONDS = (1.0, 3.0, 9.0)
_SECONDS_BETWEEN_REPORTS = 0.1


@dataclass(frozen=True)
class ProgressEvent:
    """One report of a long step, or of an item of it, such as a layer; `done` and `total` are bytes, if known."""

    stage: str
    item: str = ""
    text: str = ""
    done: int | None = None
    total: int | None = None
    is_over: bool = False


Report = Callable[[ProgressEvent], None]


def ignore_progress(progress: ProgressEvent) -> None:
    del progress


@dataclass
class ByteCounter:
    """Count bytes, and report them at most ten times a second."""

    report: Report
    stage: str
    total: int | None
    done: int = 0
    last_report: float = 0.0

    def advance(self, num_bytes: int) -> None:
        self.done += num_bytes
        now = time.monotonic()
        if now - self.last_report > _SECONDS_BETWEEN_REPORTS:
            self.last_report = now
            self.report(ProgressEvent(self.stage, done=self.done, total=self.total))


class TransientError(ImageError):
    """A failure that may be temporary, such as a lost connection or a restart of the registry."""


def retry(attempt: Callable[[], ResultT], report: Report, stage: str, waits: Sequence[float] | None = None) -> ResultT:
    """Return what `attempt` returns; after each `TransientError`, wait for the next of `waits` seconds and retry."""
    for wait in RETRY_SECONDS if waits is None else waits:
        try:
            return attempt()
        except TransientError as error:
            report(ProgressEvent(stage, text=f"{error.what}; trying again in {wait:g} s"))
            time.sleep(wait)
    return attempt()
