"""End a run that hangs: a step that takes far longer than those before it.

Every rank watches its own steps. All ranks notice a hang, since they wait for each other. Each writes its Python
stacks, torch's record of the last collectives, and a report; the rank without a report, or behind the others, is the
cause. The processes then end, and the job script restarts them from the newest checkpoint.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Self

from ftkit.files import read_json_if_valid, write_json
from ftkit.runs.rank_errors import record_rank_error
from ftkit.train.observers.observer import Observer
from ftkit.train.private_apis.torch import dump_collectives

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from ftkit.planning.layout import RunLayout
    from ftkit.train.observers.observer import Phase
    from ftkit.train.observers.progress import Progress
    from ftkit.train.world import World

log = logging.getLogger(__name__)

_LIMIT_IN_MEDIANS = 10.0
_NUM_TIMED_STEPS = 64
_MIN_TIMED_STEPS = 5
"""Steps before there is a limit: the first ones compile."""
_GRACE_SECONDS = 15.0
"""Seconds to wait for the reports of the other ranks."""
_MAX_SHOWN = 8


class HangError(Exception):
    """A step takes far longer than those before it."""


@dataclass(frozen=True)
class HangReport:
    """State of a rank when it noticed the hang: the step, and whether it waited for its batch."""

    host: str
    step: int
    waits_for_batch: bool


class Watchdog(Observer):
    """Watches the steps of this rank from a separate thread. A step ends where this observer's `end_step` is called."""

    def __init__(self, layout: RunLayout, world: World, progress: Progress, floor_seconds: float) -> None:
        """Start to measure how long a step takes; shorter ones than `floor_seconds` never count as a hang."""
        self._layout = layout
        self._world = world
        self._progress = progress
        self._floor = floor_seconds
        self._waits_for_batch = False
        self._seconds: deque[float] = deque(maxlen=_NUM_TIMED_STEPS)
        self._now: tuple[int, float] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._layout.hang_report(self._world.rank).unlink(missing_ok=True)  # of an earlier start
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()

    def begin(self, phase: Phase) -> None:
        self._waits_for_batch = phase == "batch"
        if self._waits_for_batch:
            self._now = self._progress.step + 1, time.monotonic()

    def end_step(self) -> None:
        """Record that the step has ended; there is no limit until the next one begins."""
        if self._now is not None:
            self._seconds.append(time.monotonic() - self._now[1])
        self._now = None

    @property
    def limit_seconds(self) -> float | None:
        """The time after which a step counts as a hang; None during the first steps."""
        if len(self._seconds) < _MIN_TIMED_STEPS:
            return None
        return max(self._floor, _LIMIT_IN_MEDIANS * median(self._seconds))

    def _watch(self) -> None:
        while not self._ended.wait(min(5.0, self._floor / 4)):
            now, limit = self._now, self.limit_seconds
            if now is not None and limit is not None and time.monotonic() - now[1] > limit:
                self._end_run(now[0], limit)

    def _end_run(self, step: int, limit: float) -> None:
        """Write stacks, collectives and the report, and end this process."""
        rank, layout = self._world.rank, self._layout
        report = HangReport(socket.gethostname(), step, self._waits_for_batch)
        with suppress(OSError):
            write_json(layout.hang_report(rank), report)
            with layout.stacks(rank).open("w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file)
            if collectives := dump_collectives():
                layout.collectives(rank).write_bytes(collectives)
        reports = self._gather_reports()
        cause = describe_culprits(reports, self._world.size, step)
        error = HangError(
            f"step {step} takes longer than {limit:.0f} s: {cause}. Stacks of all ranks: {layout.stacks(rank).parent}"
        )
        log.error("%s", error)
        os._exit(record_rank_error(error, layout.rank_error(rank), layout.disk_full, rank=rank))

    def _gather_reports(self) -> dict[int, HangReport]:
        deadline = time.monotonic() + _GRACE_SECONDS
        while True:
            found = {
                rank: report
                for rank in range(self._world.size)
                if (report := read_json_if_valid(self._layout.hang_report(rank), HangReport))
            }
            if len(found) == self._world.size or time.monotonic() > deadline:
                return found
            time.sleep(0.5)


def describe_culprits(reports: Mapping[int, HangReport], size: int, step: int) -> str:
    """Describe which of `size` ranks the others wait for; `step` is the current one of the reporting rank."""
    if silent := [str(rank) for rank in range(size) if rank not in reports]:
        return f"no report from {_ranks(silent)}"
    behind = [f"{rank} on {each.host} in step {each.step}" for rank, each in reports.items() if each.step < step]
    waiting = [f"{rank} on {each.host}" for rank, each in reports.items() if each.waits_for_batch]
    if behind:
        return f"the others wait for {_ranks(behind)}"
    if waiting:
        return f"no batch yet for {_ranks(waiting)}"
    return "all ranks wait in the same step (a network problem, or ranks that execute different code)"


def _ranks(words: list[str]) -> str:
    shown = ", ".join(words[:_MAX_SHOWN]) + (f" and {len(words) - _MAX_SHOWN} more" if len(words) > _MAX_SHOWN else "")
    return f"rank{'s' if len(words) > 1 else ''} {shown}"
