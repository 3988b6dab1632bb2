"""Host memory: what this process uses and may still allocate, in bytes; pinned memory for copies from and to GPUs."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return how much more this job's processes may allocate: the machine's free memory, or less if cgroups limit it.

    0 if unknown.
    """
    machine = _kibibytes(proc / "meminfo", "MemAvailable:")
    return min([machine, *_free_in_cgroups(proc, cgroups)])


def total_bytes(proc: Path = PROC) -> int:
    """Return the host memory of this machine; 0 if unknown."""
    return _kibibytes(proc / "meminfo", "MemTotal:")


def resident_bytes(proc: Path = PROC) -> tuple[int, int]:
    """Return the resident set of this process, and its peak since `reset_peak`; zeros if unknown."""
    return _kibibytes(proc / "self" / "status", "VmRSS:"), _kibibytes(proc / "self" / "status", "VmHWM:")


def reset_peak(proc: Path = PROC) -> None:
    """Reset the peak; if that is not permitted, it stays the peak since the process's start."""
    try:
        (proc / "self" / "clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


_VERSIONS = (
    ("", "", "memory.max", "memory.current", "inactive_file", "active_file"),
    ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"),
)
"""Names of both versions of cgroups: the key of `/proc/self/cgroup`, the folder of the groups, and their files."""


def _free_in_cgroups(proc: Path, cgroups: Path) -> list[int]:
    """Return the free memory of each cgroup that limits this process; its file cache counts as free."""
    own = [line.split(":", 2) for line in _lines(proc / "self" / "cgroup")]
    left = []
    for version, mount, limit_file, used_file, *cached in _VERSIONS:
        paths = [Path(path.lstrip("/")) for _, key, path in own if version in key.split(",")]
        for folder in {cgroups / mount / folder for path in paths for folder in (path, *path.parents)}:
            limit = "".join(_lines(folder / limit_file))
            if limit.isdigit():
                used = int("".join(_lines(folder / used_file)) or 0)
                left.append(max(0, int(limit) - used + sum(_field(folder / "memory.stat", name) for name in cached)))
    return left


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

    It has the size of the tensor: torch's allocator of pinned memory rounds up to a power of two, up to twice the size.
    Reuse it: pinning takes about a second for 3 GiB.
    """
    if not tensor.is_cuda or not tensor.numel():
        return torch.empty_like(tensor, device="cpu")
    strides = torch.empty_like(tensor, device="meta").stride()
    memory = pin(np.empty(tensor.numel() * tensor.element_size(), np.uint8))
    return torch.from_numpy(memory).view(tensor.dtype).as_strided(tensor.shape, strides)


def pin(memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Pin memory until it is freed.

    Addresses that stayed pinned would be given out again, and CUDA can't copy to memory that is pinned in part.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)))
    unpin = weakref.finalize(memory, runtime.cudaHostUnregister, memory.ctypes.data)
    unpin.atexit = False  # CUDA may be gone by then
    return memory
