"""Step times of this rank, within collectives and outside of them, so that stragglers can be found.

The decoder layers of a step's first micro-batch are timed: on a GPU with CUDA events on the compute stream, read once
the device has passed them anyway; on a CPU with the clock. FSDP2 all-gathers a layer's weights in a forward pre-hook:
the time between a hook before that one and a hook after it is waiting, and the forward itself is computing.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

from ftkit.files import write_file, write_json
from ftkit.runs.stragglers import MIN_STEPS, RankTiming, find_stragglers, read_timings
from ftkit.train.observers.observer import Observer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from torch import nn

    from ftkit.train.observers.observer import Phase, StepResult
    from ftkit.train.observers.progress import Progress
    from ftkit.train.world import World

log = logging.getLogger(__name__)

_WINDOW = 100
_WRITE_SECONDS = 60.0
"""Between two writes of a rank: thousands of ranks may share a file system."""


class LayerMarks:
    """Records in `marks` when the device reaches a decoder layer, begins it and ends it; see the module's docstring."""

    def __init__(self, layers: Iterable[nn.Module], device: torch.device) -> None:
        """Register hooks before and after those of FSDP2."""
        self._is_cuda = device.type == "cuda"
        self.marks: list[Any] | None = None
        for layer in layers:
            layer.register_forward_pre_hook(self._mark, prepend=True)
            layer.register_forward_pre_hook(self._mark)
            layer.register_forward_hook(self._mark, prepend=True)

    def _mark(self, *_: object) -> None:
        if self.marks is None:
            return
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self, marks: list[Any]) -> tuple[float, float]:
        """Return the seconds in layers, and of waiting before them. The device must be past all marks."""
        between = [
            first.elapsed_time(second) / 1000 if self._is_cuda else second - first for first, second in pairwise(marks)
        ]
        return sum(between[1::3]), sum(between[::3])


class RankTimes(Observer):
    """Measures the steps of this rank, writes their medians to its file, and reports stragglers on rank 0."""

    def __init__(self, progress: Progress, world: World, layers: Iterable[nn.Module]) -> None:
        """Begin to measure decoder layers; remove files of earlier starts."""
        self._progress = progress
        self._layout = progress.plan.layout
        self._world = world
        # Where collectives run within layers (ZeRO-3, context parallelism), waiting can't be told from computing.
        sharded = [layer for layer in layers if isinstance(layer, FSDPModule)] if world.context.size == 1 else []
        self._layers = LayerMarks(sharded if world.size > 1 else [], world.device)
        self._pending: dict[int, list[Any]] = {}
        self._steps: deque[tuple[float, float, float, float]] = deque(maxlen=_WINDOW)
        self._last_step = 0
        self._num_unwritten = 0
        self._written = time.monotonic()
        self._reported: set[str] = set()
        self._remove_old_files()

    def _remove_old_files(self) -> None:
        own = self._layout.rank_timing(self._world.rank)
        old = self._layout.logs.glob("timing-*.json") if self._world.is_first else [own]
        with suppress(OSError):
            for path in [*old, *([self._layout.stragglers] if self._world.is_first else [])]:
                path.unlink(missing_ok=True)

    def begin(self, phase: Phase) -> None:
        """Mark the layers of the forward of a step's first micro-batch."""
        step = self._progress.step + 1
        if phase == "forward" and step not in self._pending:
            self._layers.marks = self._pending[step] = []
        else:
            self._layers.marks = None

    def report(self, result: StepResult) -> None:
        """Add a step that the device has completed."""
        marks = self._pending.pop(result.step, None)
        if not marks:
            return
        computing, waiting = self._layers.seconds(marks)
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
            write_json(self._layout.rank_timing(self._world.rank), timing)
            if is_due and self._world.is_first:
                self.report_stragglers()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._world.is_first:  # the last save waited for all ranks, so all have written their times
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
