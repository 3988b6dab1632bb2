"""How much memory a run holds, from stage to stage."""

from __future__ import annotations

import logging
import time
from dataclasses import astuple, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ftkit.config.execution import GIB
from ftkit.runs.records import MemoryRecord
from ftkit.train.memory.host_memory import forget_peak, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.train.components.metrics import Recorder
    from ftkit.train.engine import Engine
    from ftkit.train.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceMemory:
    """What a process holds of its device, in GiB; on processors its resident set, which is also what it reserved."""

    allocated: float
    peak: float
    reserved: float


def read_memory(device: torch.device) -> DeviceMemory:
    """Return what this process holds. Counters of the host: the device need not wait."""
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
    """Records, at the end of each stage of a run, what is held and what the peak was. All ranks take the same stages.

    Attributes:
        stage: what goes on; empty before the first one.
    """

    def __init__(self, world: World, recorder: Recorder) -> None:
        self._world = world
        self._recorder = recorder
        self._highest = 0.0
        self.stage = ""

    def begin(self, stage: str) -> None:
        """End the stage that goes on, and begin another; an empty one for the end of the run."""
        memory = read_memory(self._world.device)
        self._highest = max(self._highest, memory.peak)
        if self.stage:
            self._record(memory)
        self.stage = stage
        if self._world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._world.device)
        else:
            forget_peak()

    def follow_first_step(self, engine: Engine) -> None:
        """Begin stages where the first micro-batch's forward and backward end, and the first step."""
        self.begin("first forward")
        _after_next_call(engine.model, "summed_loss", partial(self.begin, "first backward"))
        _after_next_call(engine, "backward", partial(self.begin, "first step"))
        _after_next_call(engine, "step", partial(self.begin, "training"))

    def peak_gib(self) -> float | None:
        """Return the most that was allocated since the start, whichever stage it was in; None on processors."""
        if self._world.device.type != "cuda":
            return None
        return max(self._highest, read_memory(self._world.device).peak)

    def _record(self, memory: DeviceMemory) -> None:
        ranks = self._world.gather_objects(astuple(memory))
        largest = DeviceMemory(*map(max, zip(*ranks, strict=True)))
        self._recorder.write(MemoryRecord(time.time(), self.stage, *ranks[0], *astuple(largest)))
        log.info(
            "memory after %s: %.2f GiB allocated, peak %.2f GiB, reserved %.2f GiB (%.2f, %.2f and %.2f GiB on the "
            "ranks with the most)", self.stage, *astuple(memory), *astuple(largest),
        )  # fmt: skip


def _after_next_call(owner: Any, name: str, then: Callable[[], None]) -> None:
    """Do something after the next call of a method, and leave the method as it was."""
    method, own = getattr(owner, name), vars(owner).get(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
        result = method(*args, **kwargs)
        then()
        return result

    setattr(owner, name, call)
