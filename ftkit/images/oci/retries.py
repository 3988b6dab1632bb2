"""Try again what fails for a moment, waiting longer each time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from ftkit.errors import ImageError
from ftkit.images.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftkit.images.progress import Report

ResultT = TypeVar("ResultT")

WAITS_SECONDS = (1.0, 3.0, 9.0)


class TransientError(ImageError):
    """A failure that may be gone in a moment: a lost connection, a registry that restarts."""


def with_retries(
    attempt: Callable[[], ResultT], report: Report, stage: str, waits: Sequence[float] | None = None
) -> ResultT:
    """Return what `attempt` returns; repeat it while it raises TransientError, at most so often."""
    for wait in WAITS_SECONDS if waits is None else waits:
        try:
            return attempt()
        except TransientError as error:
            report(Progress(stage, text=f"{error.what}; trying again in {wait:g} s"))
            time.sleep(wait)
    return attempt()
