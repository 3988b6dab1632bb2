"""Copies of a sharded state in main memory, which training can't change under the hands of who writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh


def empty_pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return uninitialised main memory for a copy of a tensor, pinned if the tensor is on a GPU.

    It takes as many bytes as the tensor has: torch's own allocator of pinned memory rounds up to a power of two, of a
    model's state and activations up to twice what they need. It stays pinned to the end of the process, so keep it
    and use it again: pinning takes about a second for 3 GiB.
    """
    host = torch.empty_like(tensor, device="cpu")
    if tensor.is_cuda and host.numel():
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(runtime.cudaHostRegister(host.data_ptr(), host.numel() * host.element_size(), 0)))
    return host


class HostSnapshot:
    """One copy at a time. Its buffers serve for the next one again."""

    def __init__(self, host_mesh: DeviceMesh) -> None:
        self._mesh = host_mesh
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}

    @torch.no_grad()
    def take(self, state: Any) -> Any:
        """Return dictionaries and lists like those of `state`, with each tensor copied to main memory."""
        copied = self._copy(state, ())
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # host sync: the next step would change what is still being copied
        return copied

    def _copy(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, dict):
            return {key: self._copy(inner, (*path, key)) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._copy(inner, (*path, index)) for index, inner in enumerate(value)]
        if isinstance(value, DTensor):
            local = self._copy(value.to_local(), path)
            return DTensor.from_local(
                local, self._mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        if isinstance(value, torch.Tensor):
            return self._buffer(value, path).copy_(value, non_blocking=True)
        return value

    def _buffer(self, like: torch.Tensor, path: tuple[Any, ...]) -> torch.Tensor:
        if path not in self._buffers:
            self._buffers[path] = empty_pinned_like(like)
        return self._buffers[path]


def state_bytes(state: Any) -> int:
    """Count the bytes of the tensors of a state on this rank."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(state))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _tensors(inner)
    elif isinstance(value, DTensor):
        yield value.to_local()
    elif isinstance(value, torch.Tensor):
        yield value
