"""Offload what checkpointed layers save to host memory between forward and backward pass."""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ftkit.train.memory.usage import empty_pinned_like

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager


@dataclass(eq=False)
class _Layer:
    """The offloaded tensors of a layer; `before` was offloaded before it, so the backward pass needs it after it."""

    before: weakref.ref[_Layer] | None  # unless its graph was dropped without a backward pass
    host: list[torch.Tensor] = field(default_factory=list)  # none once they are loaded
    device: dict[int, torch.Tensor] = field(default_factory=dict)  # while they are prefetched and not yet loaded


@dataclass(frozen=True, eq=False)
class _Offloaded:
    """A tensor in host memory, by its layer and index there."""

    layer: _Layer
    index: int


class ActivationOffload:
    """Copies what layers save to host memory and back on a separate stream, while layers compute.

    A layer's tensors stay on the device until the next layer offloads its own: by then their copies are done, and
    nothing waits for them. Loading a tensor of a layer prefetches those of the layer before it, which the backward pass
    needs next. On CPUs there are no streams, and copies are synchronous. Host buffers are reused: copies into and out
    of them are on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._library = torch.get_device_module(device)
        self._stream = self._library.Stream()
        self._newest: weakref.ref[_Layer] | None = None
        self._being_copied: list[torch.Tensor] = []
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = defaultdict(list)

    def offloading(self, layer_input: torch.Tensor, existing: Iterable[torch.Tensor]) -> AbstractContextManager[object]:
        """Return a context to call a layer in, which offloads the layer's input and all that the layer computes.

        `layer_input` is [B, T, H]. Parameters, buffers and other inputs of the layer exist already, and stay.
        """
        num_tokens = layer_input.numel() // max(1, layer_input.shape[-1])
        staying = {address for tensor in existing for address in _addresses(tensor)} - {*_addresses(layer_input)}
        dtypes = {layer_input.dtype, torch.float32}
        layer: _Layer | None = None

        def pack(tensor: torch.Tensor) -> _Offloaded | torch.Tensor:
            nonlocal layer
            # Less than a number per token, or integers: borders of documents, states of random generators.
            is_small = tensor.numel() < max(1, num_tokens) or tensor.dtype not in dtypes
            if is_small or not staying.isdisjoint(_addresses(tensor)):
                return tensor
            layer = layer or self._begin_layer()
            return self._offload(tensor, layer)

        def unpack(saved: _Offloaded | torch.Tensor) -> torch.Tensor:
            return self._load(saved) if isinstance(saved, _Offloaded) else saved

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _begin_layer(self) -> _Layer:
        # The copies of the previous layer are done: its memory may be reused.
        self._library.current_stream().wait_stream(self._stream)
        self._being_copied.clear()
        layer = _Layer(self._newest)
        # The graph holds the layer. If it is dropped without a backward pass, as by checks before step 1, nothing is
        # left to prefetch, and the host buffers are reused.
        weakref.finalize(layer, self._reuse, layer.host).atexit = False
        self._newest = weakref.ref(layer)
        return layer

    def _reuse(self, buffers: list[torch.Tensor]) -> None:
        for host in buffers:
            self._free[host.shape, host.dtype].append(host)
        buffers.clear()

    def _offload(self, tensor: torch.Tensor, layer: _Layer) -> _Offloaded:
        free = self._free[tensor.shape, tensor.dtype]
        host = free.pop() if free else empty_pinned_like(tensor)
        self._stream.wait_stream(self._library.current_stream())
        with self._library.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        self._being_copied.append(tensor)
        layer.host.append(host)
        return _Offloaded(layer, len(layer.host) - 1)

    def _load(self, offloaded: _Offloaded) -> torch.Tensor:
        layer = offloaded.layer
        if layer.host:  # the first of the layer's tensors: wait for all, and prefetch those of the layer before it
            self._prefetch(layer)
            self._library.current_stream().wait_stream(self._stream)
            self._reuse(layer.host)
            self._being_copied.clear()
            self._newest = layer.before
            if layer.before is not None and (before := layer.before()) is not None:
                self._prefetch(before)
        return layer.device.pop(offloaded.index)

    def _prefetch(self, layer: _Layer) -> None:
        if layer.device:
            return
        for index, host in enumerate(layer.host):
            # The compute stream allocates this memory: it must be done with it before the copy, and uses it afterwards.
            tensor = layer.device[index] = torch.empty_like(host, device=self._device)
            self._stream.wait_stream(self._library.current_stream())
            with self._library.stream(self._stream):
                tensor.copy_(host, non_blocking=True)


def offloads_of_layers(are_offloaded: Sequence[bool], device: torch.device) -> list[ActivationOffload | None]:
    """Return what offloads each layer: one object for all that are offloaded, because it prefetches the next one."""
    offload = ActivationOffload(device) if any(are_offloaded) else None
    return [offload if is_offloaded else None for is_offloaded in are_offloaded]


def _addresses(tensor: torch.Tensor) -> Iterator[int]:
    """Yield the addresses of a tensor's memory, or of that of the tensors in it (DTensor, gathered weights)."""
    if hasattr(tensor, "__tensor_flatten__"):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in parts:
            if isinstance(part, torch.Tensor):  # DTensor also lists its mesh
                yield from _addresses(part)
    else:
        yield tensor.untyped_storage().data_ptr()
