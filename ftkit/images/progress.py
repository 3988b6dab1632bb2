"""Progress of long steps, which the command line shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_SECONDS_BETWEEN_REPORTS = 0.1


@dataclass(frozen=True)
class ProgressEvent:
    """One report of a long step.

    Args:
        stage: the step, such as `pulling nvcr.io/nvidia/pytorch:25.02-py3`.
        item: a part of it, such as a layer's short id; empty for the whole step.
        text: its current action, or a line of its output.
        done: bytes done; None if they are not counted.
        total: total bytes; None if unknown.
        is_over: whether this is the last report of the part.
    """

    stage: str
    item: str = ""
    text: str = ""
    done: int | None = None
    total: int | None = None
    is_over: bool = False


Report = Callable[[ProgressEvent], None]


def ignore_progress(progress: ProgressEvent) -> None:
    """Ignore all reports."""
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
        """Add bytes."""
        self.done += num_bytes
        now = time.monotonic()
        if now - self.last_report > _SECONDS_BETWEEN_REPORTS:
            self.last_report = now
            self.report(ProgressEvent(self.stage, done=self.done, total=self.total))
