"""Pinned main memory, which a GPU copies to and from while the CPU continues."""

from __future__ import annotations

from typing import Any

import torch


def empty_pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return uninitialized main memory for a copy of a tensor, pinned if the tensor is on a GPU.

    It takes as many bytes as the tensor has: torch's own allocator of pinned memory rounds up to a power of two, of a
    model's state and activations up to twice what they need. It stays pinned to the end of the process, so keep it
    and use it again: pinning takes about a second for 3 GiB.
    """
    host = torch.empty_like(tensor, device="cpu")
    if tensor.is_cuda and host.numel():
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(runtime.cudaHostRegister(host.data_ptr(), host.numel() * host.element_size(), 0)))
    return host
