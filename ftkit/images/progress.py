"""What a long step says while it works; the command line draws it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_SECONDS_BETWEEN_REPORTS = 0.1


@dataclass(frozen=True)
class ProgressEvent:
    """One thing that moves.

    Args:
        stage: what is being done, such as `pulling nvcr.io/nvidia/pytorch:25.02-py3`.
        item: the part that moves, such as a layer's short id; empty for the stage as a whole.
        text: what it does now, or a line that it printed.
        done: how many bytes are through; none where that is not counted.
        total: how many bytes there are; none: unknown.
        is_over: nothing more will be heard of this part.
    """

    stage: str
    item: str = ""
    text: str = ""
    done: int | None = None
    total: int | None = None
    is_over: bool = False


Report = Callable[[ProgressEvent], None]


def ignore_progress(progress: ProgressEvent) -> None:
    """Report to nobody."""
    del progress


@dataclass
class ByteCounter:
    """Reports bytes, a few times a second."""

    report: Report
    stage: str
    total: int | None
    done: int = 0
    shown: float = 0.0

    def advance(self, num_bytes: int) -> None:
        """Count."""
        self.done += num_bytes
        now = time.monotonic()
        if now - self.shown > _SECONDS_BETWEEN_REPORTS:
            self.shown = now
            self.report(ProgressEvent(self.stage, done=self.done, total=self.total))
