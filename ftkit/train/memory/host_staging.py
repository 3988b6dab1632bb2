"""Pinned host memory, for asynchronous copies from and to a GPU."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch


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
