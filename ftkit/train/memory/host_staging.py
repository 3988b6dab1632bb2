"""Pinned host memory, for asynchronous copies from and to a GPU."""

from __future__ import annotations

from typing import Any

import torch


def empty_pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return uninitialized host memory for a copy of a tensor, pinned if the tensor is on a GPU.

    It has the size of the tensor: torch's allocator of pinned memory rounds up to a power of two, up to twice the size.
    It stays pinned to the end of the process, so reuse it: pinning takes about a second for 3 GiB.
    """
    host = torch.empty_like(tensor, device="cpu")
    if tensor.is_cuda and host.numel():
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(runtime.cudaHostRegister(host.data_ptr(), host.numel() * host.element_size(), 0)))
    return host
