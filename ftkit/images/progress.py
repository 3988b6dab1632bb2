"""What a long step says while it works; the command line draws it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
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


Report = Callable[[Progress], None]


def say_nothing(progress: Progress) -> None:
    """Report to nobody."""
    del progress
