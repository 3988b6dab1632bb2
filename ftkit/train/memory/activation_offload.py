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
class _Offloaded:
    """A tensor in host memory; `before` was offloaded before this one, so the backward pass needs it after this one."""

    host: torch.Tensor
    before: _Offloaded | None


class ActivationOffload:
    """Copies layer inputs to host memory and back on a separate stream, while layers compute.

    A tensor stays on the device until the next one is offloaded: by then its copy is done, and nothing waits for it.
    Loading a tensor prefetches the one before it, which the previous layer will need next. On CPUs there are no
    streams, and copies are synchronous. Host buffers are reused: copies into and out of them are on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._library: Any = torch.get_device_module(device)
        self._stream = self._library.Stream()
        self._newest: _Offloaded | None = None
        self._prefetched: tuple[_Offloaded, torch.Tensor] | None = None
        self._being_copied: torch.Tensor | None = None
        self._free: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)

    def offloading(self, layer_input: torch.Tensor) -> AbstractContextManager[Any]:
        """Return a context to call a layer in, which offloads the layer's input but no other saved tensor."""
        address = layer_input.data_ptr()

        def pack(tensor: torch.Tensor) -> _Offloaded | torch.Tensor:
            return self._offload(tensor) if tensor.data_ptr() == address and tensor.numel() else tensor

        def unpack(saved: _Offloaded | torch.Tensor) -> torch.Tensor:
            return self._load(saved) if isinstance(saved, _Offloaded) else saved

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _offload(self, tensor: torch.Tensor) -> _Offloaded:
        computing = self._library.current_stream()
        computing.wait_stream(self._stream)  # the copy of the previous one is done: its memory may be reused
        free = self._free[tensor.shape]
        host = free.pop() if free else empty_pinned_like(tensor)
        self._stream.wait_stream(computing)
        with self._library.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        self._being_copied = tensor
        self._newest = _Offloaded(host, self._newest)
        return self._newest

    def _load(self, offloaded: _Offloaded) -> torch.Tensor:
        prefetched, tensor = self._prefetched or (None, None)
        if tensor is None or prefetched is not offloaded:
            tensor = self._copy_to_device(offloaded)
        self._free[tensor.shape].append(offloaded.host)
        self._library.current_stream().wait_stream(self._stream)
        self._being_copied = None
        self._newest = before = offloaded.before
        self._prefetched = None if before is None else (before, self._copy_to_device(before))
        return tensor

    def _copy_to_device(self, offloaded: _Offloaded) -> torch.Tensor:
        # The compute stream allocates this memory: it must be done with it before the copy, and uses it afterwards.
        tensor = torch.empty_like(offloaded.host, device=self._device)
        self._stream.wait_stream(self._library.current_stream())
        with self._library.stream(self._stream):
            tensor.copy_(offloaded.host, non_blocking=True)
        return tensor
