"""Watch the ranks: end a run that hangs, and time each rank so that stragglers can be found."""

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
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.fsdp import FSDPModule

from ftkit.files import read_json_if_valid, write_file, write_json
from ftkit.runs.failure import record_rank_error
from ftkit.runs.stragglers import MIN_STEPS, RankTiming, find_stragglers, read_timings
from ftkit.train.loop import Observer
from ftkit.train.private_apis.torch import dump_collectives

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from ftkit.planning.layout import RunLayout
    from ftkit.train.loop import Phase, Progress, StepResult
    from ftkit.train.world import World

log = logging.getLogger(__name__)

_LIMIT_IN_MEDIANS = 10.0
_NUM_TIMED_STEPS = 64
_MIN_TIMED_STEPS = 5  # before there is a limit: the first ones compile
_GRACE_SECONDS = 15.0  # to wait for the reports of the other ranks
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
    """Watches the steps of this rank from a separate thread. A step ends where this observer's `end_step` is called.

    All ranks notice a hang, since they wait for each other. Each writes its Python stacks, torch's record of the last
    collectives, and a report; the rank without a report, or behind the others, is the cause. The processes then end,
    and the job script restarts them from the newest checkpoint. Steps shorter than `floor_seconds` are no hang.
    """

    def __init__(self, layout: RunLayout, world: World, progress: Progress, floor_seconds: float) -> None:
        self._layout = layout
        self._world = world
        self._progress = progress
        self._floor = floor_seconds
        self._waits_for_batch = False
        self._seconds: deque[float] = deque(maxlen=_NUM_TIMED_STEPS)
        self._now: tuple[int, float] | None = None  # the current step, and when it began
        self._ended = threading.Event()

    def start(self) -> None:
        self._layout.hang_report(self._world.rank).unlink(missing_ok=True)  # of an earlier start
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        self._ended.set()

    def begin(self, phase: Phase) -> None:
        self._waits_for_batch = phase == "batch"
        if self._waits_for_batch:
            self._now = self._progress.step + 1, time.monotonic()

    def end_step(self) -> None:
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
        rank, layout, ranks = self._world.rank, self._layout, range(self._world.size)
        with suppress(OSError):
            write_json(layout.hang_report(rank), HangReport(socket.gethostname(), step, self._waits_for_batch))
            with layout.stacks(rank).open("w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file)
            if collectives := dump_collectives():
                layout.collectives(rank).write_bytes(collectives)
        deadline, reports = time.monotonic() + _GRACE_SECONDS, dict[int, HangReport]()
        while len(reports) < len(ranks) and time.monotonic() < deadline:
            time.sleep(0.5)
            read = {each: read_json_if_valid(layout.hang_report(each), HangReport) for each in ranks}
            reports = {each: report for each, report in read.items() if report}
        cause = describe_culprits(reports, len(ranks), step)
        error = HangError(
            f"step {step} takes longer than {limit:.0f} s: {cause}. Stacks of all ranks: {layout.stacks(rank).parent}"
        )
        log.error("%s", error)
        os._exit(record_rank_error(error, layout.rank_error(rank), layout.disk_full, rank=rank))


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


# --- Stragglers ----------------------------------------------------------------------------------


_WINDOW = 100
_WRITE_SECONDS = 60.0
"""Between two writes of a rank: thousands of ranks may share a file system."""
Mark = torch.cuda.Event | float


class RankTimes(Observer):
    """Measures the steps of this rank, writes their medians to its file, and reports stragglers on rank 0.

    Marks are recorded when the device reaches a decoder layer, begins it and ends it: on a GPU with CUDA events on the
    compute stream, read once the device has passed them anyway; on a CPU with the clock. FSDP2 all-gathers a layer's
    weights in a forward pre-hook: the time between a hook before that one and a hook after it is waiting, and the
    forward itself is computing.
    """

    def __init__(self, progress: Progress, world: World, layers: Iterable[nn.Module]) -> None:
        self._progress = progress
        self._layout = progress.plan.layout
        self._world = world
        self._is_cuda = world.device.type == "cuda"
        self._marks: list[Mark] | None = None  # of the current forward, if it is measured
        self._pending: dict[int, list[Mark]] = {}
        self._steps: deque[tuple[float, float, float, float]] = deque(maxlen=_WINDOW)
        self._last_step = 0
        self._num_unwritten = 0
        self._written = time.monotonic()
        self._reported: set[str] = set()
        # Where collectives run within layers (ZeRO-3, context parallelism), waiting can't be told from computing.
        if world.size > 1 and world.context.size == 1:
            for layer in filter(lambda each: isinstance(each, FSDPModule), layers):
                layer.register_forward_pre_hook(self._mark, prepend=True)
                layer.register_forward_pre_hook(self._mark)
                layer.register_forward_hook(self._mark, prepend=True)
        old = [self._layout.rank_timing(world.rank)]  # files of earlier starts
        if world.is_first:
            old = [*self._layout.logs.glob("timing-*.json"), self._layout.stragglers]
        with suppress(OSError):
            for path in old:
                path.unlink(missing_ok=True)

    def _mark(self, *_: object) -> None:
        if self._marks is None:
            return
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def begin(self, phase: Phase) -> None:
        """Mark the layers of the forward of a step's first micro-batch."""
        step = self._progress.step + 1
        if phase == "forward" and step not in self._pending:
            self._marks = self._pending[step] = []
        else:
            self._marks = None

    def report(self, result: StepResult) -> None:
        marks = self._pending.pop(result.step, None)
        if not marks:
            return
        between = [_seconds_between(first, second) for first, second in pairwise(marks)]
        computing, waiting = sum(between[1::3]), sum(between[::3])
        self._steps.append((result.timing.seconds, result.timing.wait_seconds, computing, waiting))
        self._last_step = result.step
        self._num_unwritten += 1

    def end_step(self) -> None:
        """Write the medians of the last steps if they are due, and the disk has room."""
        is_due = self._num_unwritten >= MIN_STEPS and time.monotonic() - self._written > _WRITE_SECONDS
        if not self._num_unwritten or not (is_due or self._progress.is_over):
            return
        self._written, self._num_unwritten = time.monotonic(), 0
        medians = (median(values) for values in zip(*self._steps, strict=True))
        rank, host, device = self._world.rank, socket.gethostname(), self._world.device.type
        timing = RankTiming(rank, host, device, self._last_step, len(self._steps), *map(float, medians))
        with suppress(OSError):
            write_json(self._layout.rank_timing(rank), timing)
            if is_due and self._world.is_first:
                self.report_stragglers()

    def finish(self) -> None:
        if self._world.is_first:  # the last save waited for all ranks, so all have written their times
            self.report_stragglers()

    def report_stragglers(self) -> None:
        """Log new stragglers and, if the recipe allows it, write the slowest for the job script. On rank 0."""
        found = find_stragglers(read_timings(self._layout))
        for each in found:
            if each.host not in self._reported:
                log.warning("%s", each)
                self._reported.add(each.host)
        if self._progress.plan.recipe.resources.exclude_stragglers:
            with suppress(OSError):
                lines = [f"{each.host}\t{each.reason}\n" for each in found[:1]]
                write_file(self._layout.stragglers, "".join(lines).encode())


def _seconds_between(first: Mark, second: Mark) -> float:
    """Return the seconds between two marks, which the device must have passed."""
    if isinstance(first, torch.cuda.Event) and isinstance(second, torch.cuda.Event):
        return float(first.elapsed_time(second)) / 1000
    return cast("float", second) - cast("float", first)
