"""Measure memory and time by stage, measure host memory, and explain out-of-memory errors."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException

from ftkit.config.execution import GIB, USABLE_MEMORY
from ftkit.errors import MemoryExhaustedError, one_line
from ftkit.planning.fit import Fit
from ftkit.planning.suggestions import check_host_memory, suggest_for
from ftkit.runs.records import FirstStepRecord, MemoryRecord

if TYPE_CHECKING:
    from ftkit.planning.plan import RunPlan
    from ftkit.train.world import World

log = logging.getLogger(__name__)


class _DeviceMemory(NamedTuple):
    """Allocated and reserved memory of a process on its device, in GiB; on a CPU, both are the resident set."""

    allocated: float
    peak: float
    reserved: float


def _read_memory(device: torch.device) -> _DeviceMemory:
    """Return the memory of this process from host counters, without a device sync."""
    if device.type == "cuda":
        allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.memory_reserved(device)
    else:
        allocated, peak = resident_bytes()
        reserved = allocated
    return _DeviceMemory(allocated / GIB, peak / GIB, reserved / GIB)


class MemoryTrace:
    """Record the allocated memory and the peak at the end of each stage. All ranks run the same stages.

    `stage` is empty before the first one. `step` counts from 1, and is None outside of the training loop.
    """

    def __init__(
        self, world: World, write: Callable[[MemoryRecord], None], begun: Mapping[str, float] | None = None
    ) -> None:
        """Start without a stage; `begun` has the start times of earlier stages, in order."""
        self._world = world
        self._write = write
        self._highest = 0.0
        self._begun = dict(begun or {})
        self.stage = ""
        self.step: int | None = None

    def begin(self, stage: str) -> None:
        """End the current stage, and begin another; pass an empty one at the end of the run. Collective."""
        memory = _read_memory(self._world.device)
        self._highest = max(self._highest, memory.peak)
        if self.stage:
            ranks = self._world.gather_objects(memory)
            largest = tuple(map(max, zip(*ranks, strict=True)))
            self._write(MemoryRecord(time.time(), self.stage, *ranks[0], *largest))
            log.info(
                "memory after %s: %.2f GiB allocated, peak %.2f GiB, reserved %.2f GiB (%.2f, %.2f and %.2f GiB on the "
                "ranks with the most)", self.stage, *memory, *largest,
            )  # fmt: skip
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
        """Return the record of the completed first step, with the time of each stage up to it."""
        # The host had queued the step when the current stage began; the device finished it only now.
        now = time.time()
        times = [*list(self._begun.values())[:-1], now]
        phases = {
            stage: round(end - begin, 3) for stage, (begin, end) in zip(self._begun, pairwise(times), strict=False)
        }
        return FirstStepRecord(now, step, round(now - times[0], 3), phases)

    def peak_gib(self) -> float:
        """Return the peak of allocated memory (on a CPU, of the resident set) since the start, over all stages."""
        return max(self._highest, _read_memory(self._world.device).peak)


_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed", "failed to allocate")
"""Out-of-memory messages of allocators and libraries, in lower case."""
_TOO_LOW = 0.9  # if the run was predicted to fit but did not, suggestions must fit in this fraction of the prediction


def check_free_host_memory(plan: RunPlan, world: World) -> None:
    """Check that this node has free memory for the offloaded tensors: warn if it has less, raise if less than half."""
    memory = plan.host_memory
    if memory is None or world.local_rank != 0 or not (free := available_bytes()):
        return
    # The processes have started, so their own memory is no longer free.
    for warning in check_host_memory(plan, free / GIB + memory.processes, "this node"):
        log.warning("%s", warning)


def is_out_of_memory(error: BaseException) -> bool:
    may_report = isinstance(error, RuntimeError | CheckpointException)
    is_reported = may_report and any(message in str(error).lower() for message in _MESSAGES)
    if is_reported or isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


@contextmanager
def out_of_memory_explained(
    plan: RunPlan, world: World, trace: MemoryTrace, tensors: Callable[[], Mapping[str, list[torch.Tensor]]] = dict
) -> Iterator[None]:
    """Convert an out-of-memory error to one that lists the memory by part, and changes that are predicted to fit.

    `tensors` returns the engine's tensors by part; without it, the memory is not attributed to parts.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        step = "" if trace.step is None else f", in step {trace.step}"
        memory = _read_memory(world.device)
        if world.device.type == "cuda":
            capacity = torch.cuda.get_device_properties(world.device).total_memory / GIB
        else:  # this process's share of the machine's memory
            capacity = _kibibytes(_PROC / "meminfo", "MemTotal:") / plan.placement.processes_per_node / GIB
        held = {
            part: sum(tensor.nbytes for tensor in each if tensor.device.type == world.device.type) / GIB
            for part, each in tensors().items()
        }
        rest = "activations, gathered weights and the rest" if held else "not attributed yet"
        held[rest] = max(0.0, memory.allocated - sum(held.values()))
        predicted = plan.memory
        raise MemoryExhaustedError(
            f"out of memory in stage '{trace.stage}'{step}: {memory.allocated:.1f} GiB allocated and "
            f"{memory.reserved:.1f} GiB reserved of {capacity:.1f} GiB ({one_line(error)})",
            meaning=f"held: {_in_gib(held)}\npredicted: {_in_gib(predicted.parts)}; {predicted.total:.1f} GiB in all, "
            f"at most (moment: {predicted.moment})",
            fix=_advice(plan, capacity, has_begun="teacher" not in trace.stage),
        ) from error


def _in_gib(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{part} {gib:.1f}" for part, gib in parts.items()) + " GiB"


def _advice(plan: RunPlan, capacity: float, *, has_begun: bool) -> str:
    fit = Fit(plan.setup)
    needed = fit.steps if has_begun else fit.memory
    predicted, usable, libraries = needed.total, USABLE_MEMORY * capacity, needed.libraries
    lower = libraries + _TOO_LOW * (predicted - libraries)
    suggestions = suggest_for(plan, usable if predicted > usable else lower, has_begun=has_begun)
    if not suggestions:
        return "no change to the recipe is predicted to fit: use GPUs with more memory, or a smaller model"
    lines = "\n".join(f"  {suggestion}" for suggestion in suggestions)
    return f"run it again with one of these, predicted to fit (GiB per process in parentheses):\n{lines}"


# --- Host memory, in bytes -----------------------------------------------------------------------

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_FILES = {
    "": ("", "memory.max", "memory.current", "inactive_file", "active_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"),
}
"""The folder of cgroups and the names of their files, by the controllers in `/proc/self/cgroup` (none in v2)."""


def available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return the bytes that this job can still allocate: the machine's free memory, or less if cgroups limit it.

    A cgroup's file cache counts as free. 0 if unknown.
    """
    left = [_kibibytes(proc / "meminfo", "MemAvailable:")]
    for _, controllers, path in (line.split(":", 2) for line in _lines(proc / "self" / "cgroup")):
        if controllers not in _CGROUP_FILES:
            continue
        mount, limit_file, used_file, *cached = _CGROUP_FILES[controllers]
        own = cgroups / mount / path.lstrip("/")
        for folder in (own, *own.parents):
            limit = "".join(_lines(folder / limit_file))
            if limit.isdigit():
                used = int("".join(_lines(folder / used_file)) or 0)
                left.append(max(0, int(limit) - used + sum(_field(folder / "memory.stat", name) for name in cached)))
    return min(left)


def resident_bytes(proc: Path = _PROC) -> tuple[int, int]:
    """Return the resident set size of this process, and its peak since `reset_peak`; zeros if unknown."""
    return _kibibytes(proc / "self" / "status", "VmRSS:"), _kibibytes(proc / "self" / "status", "VmHWM:")


def reset_peak(proc: Path = _PROC) -> None:
    """Reset the peak; if not permitted, it remains the peak since the start of the process."""
    with suppress(OSError):
        (proc / "self" / "clear_refs").write_text("5", encoding="ascii")


def _kibibytes(path: Path, name: str) -> int:
    return 1024 * _field(path, name)


def _field(path: Path, name: str) -> int:
    """Return the number that follows a name in a file; 0 if there is none."""
    return next((int(words[1]) for line in _lines(path) if (words := line.split()) and words[0] == name), 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []


def empty_pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return uninitialized host memory for a copy of a tensor, pinned if the tensor is on a GPU.

    It has exactly the size of the tensor, while torch's pinned allocator rounds up to a power of two, up to twice the
    size. Reuse it: pinning takes about a second for 3 GiB.
    """
    if not tensor.is_cuda or not tensor.numel():
        return torch.empty_like(tensor, device="cpu")
    strides = torch.empty_like(tensor, device="meta").stride()
    memory = pin(np.empty(tensor.numel() * tensor.element_size(), np.uint8))
    return torch.from_numpy(memory).view(tensor.dtype).as_strided(tensor.shape, strides)


def pin(memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Pin memory until it is freed.

    If addresses stayed pinned, the allocator would reuse them, and CUDA can't copy to partly pinned memory.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)))
    unpin = weakref.finalize(memory, runtime.cudaHostUnregister, memory.ctypes.data)
    unpin.atexit = False  # CUDA may be gone by then
    return memory
