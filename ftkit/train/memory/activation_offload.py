"""Offload the inputs of checkpointed layers to host memory between forward and backward pass."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ftkit.train.memory.host_staging import empty_pinned_like

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


@dataclass(frozen=True)
class _Parked:
    """A tensor in host memory; `before` was offloaded before it, so it is needed after it."""

    host: torch.Tensor
    before: _Parked | None


class ActivationOffload:
    """Copies layer inputs to host memory and back on a separate stream, while layers compute.

    A tensor stays on the device until the next one is offloaded: by then its copy is done, and nothing waits for it.
    Fetching a tensor prefetches the one before it, which the previous layer will need next. On CPUs there are no
    streams, and copies are synchronous. Buffers are reused: the next copy into one is on the same stream as the one out
    of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._library: Any = torch.get_device_module(device)
        self._stream = self._library.Stream()
        self._newest: _Parked | None = None
        self._prefetched: tuple[_Parked, torch.Tensor] | None = None
        self._leaving: torch.Tensor | None = None
        self._free: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)

    def offloading(self, layer_input: torch.Tensor) -> AbstractContextManager[Any]:
        """Return a context to call a layer in, which offloads the layer's input but no other saved tensor."""
        address = layer_input.data_ptr()

        def park(tensor: torch.Tensor) -> _Parked | torch.Tensor:
            return self._park(tensor) if tensor.data_ptr() == address and tensor.numel() else tensor

        def fetch(kept: _Parked | torch.Tensor) -> torch.Tensor:
            return self._fetch(kept) if isinstance(kept, _Parked) else kept

        return torch.autograd.graph.saved_tensors_hooks(park, fetch)

    def _park(self, tensor: torch.Tensor) -> _Parked:
        computing = self._library.current_stream()
        computing.wait_stream(self._stream)  # the copy of the previous one is done: its memory may be reused
        free = self._free[tensor.shape]
        host = free.pop() if free else empty_pinned_like(tensor)
        self._stream.wait_stream(computing)
        with self._library.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        self._leaving = tensor
        self._newest = _Parked(host, self._newest)
        return self._newest

    def _fetch(self, parked: _Parked) -> torch.Tensor:
        prefetched, tensor = self._prefetched or (None, None)
        if tensor is None or prefetched is not parked:
            tensor = self._bring(parked)
        self._free[tensor.shape].append(parked.host)
        self._library.current_stream().wait_stream(self._stream)
        self._leaving = None
        self._newest = before = parked.before
        self._prefetched = None if before is None else (before, self._bring(before))
        return tensor

    def _bring(self, parked: _Parked) -> torch.Tensor:
        # Memory of the compute stream, which must be done with it before the copy, and uses it afterwards.
        tensor = torch.empty_like(parked.host, device=self._device)
        self._stream.wait_stream(self._library.current_stream())
        with self._library.stream(self._stream):
            tensor.copy_(parked.host, non_blocking=True)
        return tensor
