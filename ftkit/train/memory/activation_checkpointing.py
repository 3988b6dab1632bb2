"""Activation checkpointing: which tensors decoder layers save for the backward pass, where, and which they recompute.

Each layer saves the following, in addition to tensors that all layers share (rotary tables, masks, `cu_seqlens`):

* `none`: all tensors that autograd saves. Compiled layers save fewer: they recompute chains of element-wise operations.
* `selective`: the layer's input, and the outputs of attention, with its log-sum-exp (fp32, one per head and token), and
  of matmuls with its weights (queries, keys, values, attention's output projection, gate, up, down), unless the inner
  dimension is below `WIDE`, as for adapters' second matrices. Norms, rotations, activations and sums are recomputed.
  Compiled layers save an output only if the backward pass reads it, so they drop those of `down` and the output
  projection if no norm follows them.
* `except_attention`: the layer's input, and attention's output with its log-sum-exp. All else is recomputed. Context
  parallelism saves the output before its heads are exchanged for tokens, as attention's backward pass reads it.
* `full`: the layer's input. One layer at a time is recomputed, with the activations that `none` would save, and without
  its last matmul unless a norm follows it.

`activation_offload` copies the saved tensors of all modes but `none` to host memory, and keeps those of two layers on
the device at a time. Only compiled layers offload the outputs of attention and matmuls.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ftkit.train.memory.compile import WIDE, CompiledForward, Forward, tag_with_sources, warn_once
from ftkit.train.memory.usage import empty_pinned_like
from ftkit.train.private_apis.torch import (
    GROUPED_MM,
    SCALED_MM,
    TRACES_FULL_CHECKPOINTS,
    cacheable_policy,
    find_tensors,
    raise_recompile_limit,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch._ops import OpOverload

    from ftkit.config.training import ActivationCheckpointing

    Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]

_CPU = torch.device("cpu")

_LOOPS_OVER_TOKENS = {
    "MiniMaxLightningAttention", "Qwen4ExpTextQSAIndexer", "RecurrentGemmaRglru", "RwkvSelfAttention", "xLSTMBackend",
}  # fmt: skip
"""Classes of transformers 5.23 that loop over tokens or chunks. A compiler would unroll such a loop into a graph that
takes minutes to compile."""
_INNER_FACTOR = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.bmm.default: 0,
    SCALED_MM: 0,
} | ({} if GROUPED_MM is None else {GROUPED_MM.default: 0})
"""Matmuls, each with the index of the argument whose last dimension is the inner dimension."""


def apply_activation_checkpointing(
    layers: nn.ModuleList,
    modes: Sequence[ActivationCheckpointing],
    *,
    compiled: bool,
    offloaded: Sequence[bool] = (),
    device: torch.device = _CPU,
) -> None:
    """Replace each decoder layer with one that is compiled, recomputed in the backward pass, or both.

    Parameter names don't change. The compiler traces the checkpoint, so it takes part in the selection, and recomputes
    only what the backward pass reads (docs/adr/0051). If it can't trace a `full` checkpoint, the compiled layer runs
    twice. `layers` are in the order of their calls; `modes` and `offloaded` have an entry for each. `offloaded` layers
    save their tensors in host memory instead of on `device`; by default, none do.
    """
    if compiled:
        raise_recompile_limit(len(layers))
        tag_with_sources()
    offloaded = offloaded or [False] * len(layers)
    offload = ActivationOffload(device) if any(offloaded) else None  # of all layers, as it prefetches the next one's
    for index, (layer, mode, offloads) in enumerate(zip(layers, modes, offloaded, strict=True)):
        loops = {type(module).__name__ for module in layer.modules()} & _LOOPS_OVER_TOKENS
        is_compiled = compiled and not loops
        if compiled and loops:
            reason = "It is slow, and takes more memory."
            warn_once(f"{type(layer).__name__} is not compiled, because {loops.pop()} loops over tokens", reason)
        if mode == "none" and not is_compiled:
            continue
        layer_class = _recomputed_class(type(layer))  # type: ignore[arg-type] # a class can be hashed
        layers[index] = layer_class(layer, mode, compiled=is_compiled, offload=offload if offloads else None)


def activation_checkpointing_of(layer: nn.Module) -> ActivationCheckpointing:
    return layer.activation_checkpointing if isinstance(layer, RecomputedLayer) else "none"


def is_offloaded(layer: nn.Module) -> bool:
    """Return whether a decoder layer saves its activations in host memory."""
    return isinstance(layer, RecomputedLayer) and layer.offload is not None


class RecomputedLayer(nn.Module):
    """A mixin for the class of a decoder layer that replaces its forward, as `fully_shard` mixes in `FSDPModule`.

    A subclass instead of a wrapper keeps the names of parameters, and the layer's attributes for the family's code.
    """

    activation_checkpointing: ActivationCheckpointing

    def __init__(
        self, layer: nn.Module, mode: ActivationCheckpointing, *, compiled: bool, offload: ActivationOffload | None
    ) -> None:
        """Adopt a layer's parameters, buffers, submodules and attributes."""
        vars(self).update(vars(layer))
        self._run = _forward_of(super().forward, f"{type(layer).__qualname__}.forward", mode, compiled=compiled)
        self.activation_checkpointing = mode
        self.offload = offload

    def forward(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> object:
        """Run the family's forward; `hidden` is [B, T, H]."""
        if self.offload is None:
            return self._run(hidden, *args, **kwargs)
        existing = [*self.parameters(), *self.buffers(), *find_tensors((args, kwargs))]
        with self.offload.offloading(hidden, existing):
            return self._run(hidden, *args, **kwargs)


@cache
def _recomputed_class(layer_class: type[nn.Module]) -> type[RecomputedLayer]:
    return type(f"Recomputed{layer_class.__name__}", (RecomputedLayer, layer_class), {})


def _forward_of(plain: Forward, name: str, mode: ActivationCheckpointing, *, compiled: bool) -> Forward:
    """Return a layer's forward that is recomputed, compiled, or both; `name` is for warnings."""
    if mode == "full" and compiled:
        # torch before 2.13 marks the operators of autograd functions for recomputation only if there is a policy.
        recomputed = _recomputing(plain, _save_nothing)
        called_twice = _recomputing(CompiledForward(plain, name))
        return CompiledForward(recomputed, name, fallback=called_twice) if TRACES_FULL_CHECKPOINTS else called_twice
    if mode == "full":
        return _recomputing(plain)
    forward = plain if mode == "none" else _recomputing(plain, _CONTEXTS[mode])
    return CompiledForward(forward, name) if compiled else forward


def _recomputing(forward: Forward, contexts: Callable[[], Contexts] | None = None) -> Forward:
    """Return a forward that is recomputed in the backward pass, apart from what `contexts` save."""

    def recomputing(*args: Any, **kwargs: Any) -> object:
        if contexts is not None:
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        # The state of random numbers can't be read in a CUDA graph, so decoders that draw some are not captured.
        is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=not is_captured, **kwargs)

    return recomputing


def _is_compute_bound(operation: OpOverload, args: tuple[torch.Tensor, ...]) -> bool:
    if operation in _INNER_FACTOR:
        return bool(args[_INNER_FACTOR[operation]].shape[-1] >= WIDE)
    return _is_attention(operation)


def _is_attention(operation: OpOverload, _: object = None) -> bool:
    # By name, because torch has an operator per attention kernel, and each version adds some.
    name: str = operation.name()  # type: ignore[no-untyped-call]
    return "attention" in name or name == "ftkit::token_mixer"


def _contexts(
    is_saved: Callable[[OpOverload, tuple[torch.Tensor, ...]], bool],
    otherwise: CheckpointPolicy = CheckpointPolicy.MUST_RECOMPUTE,
) -> Contexts:
    """Return the contexts of a checkpoint that saves operators' outputs if `is_saved`, and recomputes all others."""

    def policy(_: object, operation: OpOverload, *args: torch.Tensor, **__: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_saved(operation, args) else otherwise

    contexts: Contexts = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts


@cacheable_policy
def _save_nothing() -> Contexts:
    return _contexts(lambda *_: False)


@cacheable_policy
def _select() -> Contexts:
    return _contexts(_is_compute_bound, CheckpointPolicy.PREFER_RECOMPUTE)


@cacheable_policy
def _save_attention() -> Contexts:
    return _contexts(_is_attention)


_CONTEXTS: dict[ActivationCheckpointing, Callable[[], Contexts]] = {
    "selective": _select,
    "except_attention": _save_attention,
}


# --- Offload to host memory ----------------------------------------------------------------------


@dataclass(eq=False)
class _Layer:
    """The offloaded tensors of a layer. `before` is the layer offloaded before it, which the backward needs next."""

    before: weakref.ref[_Layer] | None  # dead if its graph was dropped without a backward pass
    host: list[torch.Tensor] = field(default_factory=list)  # empty once they are loaded
    device: dict[int, torch.Tensor] = field(default_factory=dict)  # prefetched tensors that are not yet loaded


_Offloaded: TypeAlias = tuple[_Layer, int]  # a tensor in host memory, by its layer and index there


class ActivationOffload:
    """Copy saved tensors to host memory and back on a separate stream while layers compute.

    A layer's tensors stay on the device until the next layer offloads its own. By then, their copies are usually done,
    so nothing waits. Loading a tensor prefetches those of the layer before it, which the backward pass needs next. On
    CPUs, there are no streams, and copies are synchronous. Host buffers can be reused, because all copies into and out
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
        """Return a context that offloads a layer's input, [B, T, H], and all tensors that the layer saves.

        Tensors that are `existing` before the call stay on the device: parameters, buffers and other inputs.
        """
        num_tokens = layer_input.numel() // max(1, layer_input.shape[-1])
        staying = {address for tensor in existing for address in _addresses(tensor)} - {*_addresses(layer_input)}
        dtypes = {layer_input.dtype, torch.float32}
        layer: _Layer | None = None

        def pack(tensor: torch.Tensor) -> _Offloaded | torch.Tensor:
            nonlocal layer
            # Fewer elements than tokens, or integers, such as document boundaries and RNG states.
            is_small = tensor.numel() < max(1, num_tokens) or tensor.dtype not in dtypes
            if is_small or not staying.isdisjoint(_addresses(tensor)):
                return tensor
            layer = layer or self._begin_layer()
            return self._offload(tensor, layer)

        def unpack(saved: _Offloaded | torch.Tensor) -> torch.Tensor:
            return self._load(*saved) if isinstance(saved, tuple) else saved

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _begin_layer(self) -> _Layer:
        # Wait for the copies of the previous layer, so that its memory can be reused.
        self._library.current_stream().wait_stream(self._stream)
        self._being_copied.clear()
        layer = _Layer(self._newest)
        # The graph holds the layer. If it is dropped without a backward pass, as in checks before step 1, there is
        # nothing to prefetch, and the host buffers are reused.
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
        return layer, len(layer.host) - 1

    def _load(self, layer: _Layer, index: int) -> torch.Tensor:
        if layer.host:  # first tensor of the layer: wait for all of them, and prefetch those of the layer before it
            self._prefetch(layer)
            self._library.current_stream().wait_stream(self._stream)
            self._reuse(layer.host)
            self._being_copied.clear()
            self._newest = layer.before
            if layer.before is not None and (before := layer.before()) is not None:
                self._prefetch(before)
        return layer.device.pop(index)

    def _prefetch(self, layer: _Layer) -> None:
        if layer.device:
            return
        for index, host in enumerate(layer.host):
            # The compute stream allocates and uses this memory, so the copy must wait for its earlier kernels.
            tensor = layer.device[index] = torch.empty_like(host, device=self._device)
            self._stream.wait_stream(self._library.current_stream())
            with self._library.stream(self._stream):
                tensor.copy_(host, non_blocking=True)


def _addresses(tensor: torch.Tensor) -> Iterator[int]:
    """Yield the storage addresses of a tensor, or of its inner tensors (DTensor, gathered FP8 weights)."""
    if hasattr(tensor, "__tensor_flatten__"):
        for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(part, torch.Tensor):  # DTensor also lists its mesh
                yield from _addresses(part)
    else:
        yield tensor.untyped_storage().data_ptr()
