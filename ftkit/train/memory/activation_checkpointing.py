"""Activation checkpointing: what of a decoder layer waits for the backward pass, and what is computed again there.

Kept of each layer, beside what all layers share (rotary tables, masks, the borders of documents):

* `none`: what autograd keeps. Compiled layers keep less: their element-wise chains are computed again.
* `selective`: the layer's input, the outputs of the products with its frozen or trained weights (queries, keys,
  values, attention's output projection, gate, up, down; not those of an inner dimension below `WIDE`, as adapters'
  second matrices have) and of attention, with its logarithms of sums (fp32, one a head and token). Norms, rotations,
  activations and sums are computed again. Compiled layers keep outputs only if the backward pass reads them, so
  without those of `down` and the output projection where no norm follows them.
* `full`: the layer's input; with `activation_offload` it waits in main memory, and two are on the device at a time.
  One layer at a time is computed again, and holds what `none` would keep of it.
"""

from __future__ import annotations

import inspect
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ftkit.train.memory.compile import compile_whole, raise_recompile_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    from ftkit.config.training import ActivationCheckpointing
    from ftkit.train.memory.activation_offload import ActivationOffload

WIDE = 256
"""Inner dimension from which on a product in bf16 waits for arithmetic; a narrower one waits for memory, as
element-wise operations do, and is as cheap to compute again as its output is to keep."""

_INNER_FACTOR = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.bmm.default: 0,
    torch.ops.aten._scaled_mm.default: 0,  # noqa: SLF001 - products in FP8
}
"""Matrix products, each with the place of the factor whose last dimension is the inner one."""

_MODE = "activation_checkpointing"
"""Attribute of a forward that computes again: how it does."""


def apply_activation_checkpointing(
    layers: Iterable[nn.Module],
    mode: ActivationCheckpointing,
    *,
    compiled: bool,
    offload: ActivationOffload | None = None,
) -> None:
    """Replace each layer's forward by one that is compiled, computed again in the backward pass, or both.

    A compiler takes part in the selection, so it has to see it; all of a layer is computed again by calling the
    compiled layer twice.

    Args:
        layers: decoder layers, in the order in which they are called.
        mode: what is computed again.
        compiled: whether layers are compiled.
        offload: where the inputs of layers that are all computed again wait; none: on the device.
    """
    layers = list(layers)
    if compiled:
        raise_recompile_limit(len(layers))
    for layer in layers:
        if mode == "selective":
            layer.forward = _recomputing(layer.forward, mode, context_fn=_select)
        if compiled:
            layer.forward = compile_whole(layer.forward)
        if mode == "full":
            layer.forward = _recomputing(layer.forward, mode)
            if offload is not None:
                layer.forward = _offloading(layer.forward, offload)


def activation_checkpointing_of(layer: nn.Module) -> ActivationCheckpointing:
    """Return how a layer is computed again, by what its forward really is."""
    forward = inspect.unwrap(layer.forward, stop=lambda function: hasattr(function, _MODE))
    mode: ActivationCheckpointing = getattr(forward, _MODE, "none")
    return mode


def _recomputing(forward: Callable[..., Any], mode: ActivationCheckpointing, **options: Any) -> Callable[..., Any]:
    @wraps(forward)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    setattr(recomputing, _MODE, mode)
    return recomputing


def _offloading(forward: Callable[..., Any], offload: ActivationOffload) -> Callable[..., Any]:
    @wraps(forward)
    def offloading(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with offload.around(hidden):
            return forward(hidden, *args, **kwargs)

    return offloading


def _policy(_: Any, operation: Any, *args: Any, **__: Any) -> CheckpointPolicy:
    """Keep the outputs of what takes long."""
    return CheckpointPolicy.MUST_SAVE if _takes_long(operation, args) else CheckpointPolicy.PREFER_RECOMPUTE


def _takes_long(operation: Any, args: tuple[Any, ...]) -> bool:
    if operation in _INNER_FACTOR:
        return bool(args[_INNER_FACTOR[operation]].shape[-1] >= WIDE)
    name = operation.name()
    # By name: torch has an operator for each of its attention kernels, and more of them with each version.
    return "attention" in name or name == "ftkit::nf4_product"


_select = partial(create_selective_checkpoint_contexts, _policy)
