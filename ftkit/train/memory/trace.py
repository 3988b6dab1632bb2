"""Measure the allocated memory and the time of a run, stage by stage."""

from __future__ import annotations

import logging
import time
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import torch

from ftkit.config.execution import GIB
from ftkit.runs.records import FirstStepRecord, MemoryRecord
from ftkit.train.memory.host_memory import reset_peak, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ftkit.train.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceMemory:
    """Allocated and reserved memory of a process on its device, in GiB; on a CPU, both are the resident set."""

    allocated: float
    peak: float
    reserved: float


def read_memory(device: torch.device) -> DeviceMemory:
    """Return the memory of this process, from counters of the host: no device sync."""
    if device.type == "cuda":
        counts = (
            torch.cuda.memory_allocated(device),
            torch.cuda.max_memory_allocated(device),
            torch.cuda.memory_reserved(device),
        )
    else:
        resident, peak = resident_bytes()
        counts = resident, peak, resident
    return DeviceMemory(*(count / GIB for count in counts))


class MemoryTrace:
    """Records the allocated memory and the peak at the end of each stage. All ranks run the same stages.

    Attributes:
        stage: the current one; empty before the first.
        step: the current optimizer step, counted from 1; None outside the training loop.
    """

    def __init__(
        self, world: World, write: Callable[[MemoryRecord], None], begun: Mapping[str, float] | None = None
    ) -> None:
        """Start without a stage; `begun` has earlier ones in their order, with the times when they began."""
        self._world = world
        self._write = write
        self._highest = 0.0
        self._begun = dict(begun or {})
        self.stage = ""
        self.step: int | None = None

    def begin(self, stage: str) -> None:
        """End the current stage, and begin another; an empty one at the end of the run. Collective."""
        memory = read_memory(self._world.device)
        self._highest = max(self._highest, memory.peak)
        if self.stage:
            self._record(memory)
        self.stage = stage
        self._begun.setdefault(stage, time.time())
        if self._world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._world.device)
        else:
            reset_peak()

    def begin_once(self, stage: str) -> None:
        """Begin a stage of the first step; in later steps do nothing."""
        if stage not in self._begun:
            self.begin(stage)

    def first_step(self, step: int) -> FirstStepRecord:
        """Return the record of the first step, which is complete, with the time of each stage up to it."""
        now = time.time()
        # The current stage began when the host had queued the step; the device finished it only now.
        stages, times = list(self._begun)[:-1], [*list(self._begun.values())[:-1], now]
        phases = {stage: round(end - begin, 3) for stage, begin, end in zip(stages, times[:-1], times[1:], strict=True)}
        return FirstStepRecord(now, step, round(now - times[0], 3), phases)

    def peak_gib(self) -> float:
        """Return the peak of allocated memory since the start, over all stages; on a CPU, of the resident set."""
        return max(self._highest, read_memory(self._world.device).peak)

    def _record(self, memory: DeviceMemory) -> None:
        ranks = self._world.gather_objects(astuple(memory))
        largest = DeviceMemory(*map(max, zip(*ranks, strict=True)))
        self._write(MemoryRecord(time.time(), self.stage, *ranks[0], *astuple(largest)))
        log.info(
            "memory after %s: %.2f GiB allocated, peak %.2f GiB, reserved %.2f GiB (%.2f, %.2f and %.2f GiB on the "
            "ranks with the most)", self.stage, *astuple(memory), *astuple(largest),
        )  # fmt: skip
