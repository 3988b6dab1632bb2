"""What to say when a device has no memory left: what held it, what was foreseen, what would fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from torch.distributed.checkpoint.api import CheckpointException

from ftkit.config.execution import GIB, USABLE_MEMORY
from ftkit.errors import MemoryExhaustedError
from ftkit.planning.suggestions import suggest_changes
from ftkit.train.memory.host_memory import total_bytes
from ftkit.train.memory.trace import read_memory

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from ftkit.planning.plan import RunPlan
    from ftkit.train.engine import Engine
    from ftkit.train.loop import TrainingLoop
    from ftkit.train.memory.trace import DeviceMemory, MemoryTrace
    from ftkit.train.world import World

_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed", "failed to allocate")
"""What allocators and libraries say, in lower case."""
_TOO_LOW = 0.9
"""Where the plan had foreseen that the run fits, and it did not, this part of what was foreseen may."""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error, or what caused it, says that there is no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    can_say = isinstance(error, RuntimeError | CheckpointException)
    if can_say and any(word in str(error).lower() for word in _WORDS):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


class OutOfMemoryExplainer:
    """Turns an error that says no more than "out of memory" into one that says what to do.

    Attributes:
        engine: what holds memory, once there is one.
        training: what tells the step, while it goes on.
    """

    def __init__(self, plan: RunPlan, world: World, trace: MemoryTrace) -> None:
        self._plan = plan
        self._world = world
        self._trace = trace
        self.engine: Engine | None = None
        self.training: TrainingLoop | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or not is_out_of_memory(error):
            return
        held = {} if self.engine is None else self._held(self.engine)
        step = "" if self.training is None else f", in step {self.training.progress.step + 1}"
        capacity = capacity_gib(self._plan, self._world.device)
        memory = read_memory(self._world.device)
        raise MemoryExhaustedError(
            f"out of memory in stage '{self._trace.stage}'{step}: {memory.allocated:.1f} GiB allocated and "
            f"{memory.reserved:.1f} GiB reserved of {capacity:.1f} GiB ({_first_line(error)})",
            meaning=f"held: {_held_words(held, memory)}\nforeseen: {_foreseen_words(self._plan)}",
            fix=_advice(self._plan, capacity),
        ) from error

    def _held(self, engine: Engine) -> dict[str, float]:
        """Return the GiB of each part of an engine's state that lies on the device."""
        kind = self._world.device.type
        return {
            part: sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.device.type == kind) / GIB
            for part, tensors in engine.tensors().items()
        }


def capacity_gib(plan: RunPlan, device: torch.device) -> float:
    """Return the memory of this process's device; of main memory its share."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / GIB
    return total_bytes() / plan.placement.processes_per_node / GIB


def _held_words(held: Mapping[str, float], memory: DeviceMemory) -> str:
    rest = max(0.0, memory.allocated - sum(held.values()))
    parts = dict(held) | {"activations, gathered weights and the rest" if held else "not told apart yet": rest}
    return _words(parts)


def _foreseen_words(plan: RunPlan) -> str:
    memory = plan.memory
    return f"{_words(memory.parts)}; {memory.total:.1f} GiB in all, at most (moment: {memory.moment})"


def _words(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{part} {gib:.1f}" for part, gib in parts.items()) + " GiB"


def _advice(plan: RunPlan, capacity: float) -> str:
    foreseen, usable = plan.memory.total, USABLE_MEMORY * capacity
    suggestions = suggest_changes(plan.setup, plan.cluster, usable if foreseen > usable else _TOO_LOW * foreseen)
    if not suggestions:
        return "no change of the recipe is foreseen to fit: take devices with more memory, or a smaller model"
    lines = "\n".join(f"  {suggestion}" for suggestion in suggestions)
    return (
        f"submit the run anew with one of these, foreseen to fit (what a process would take is in brackets):\n{lines}"
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
