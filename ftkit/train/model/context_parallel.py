"""Context parallelism: the ranks of a group divide the tokens of each pack, and exchange them for heads in attention.

A rank does all token-wise computation on its part of each pack. Before attention, an all-to-all gives it all tokens of
its share of the heads; after attention another one returns the tokens (DeepSpeed Ulysses, Jacobs et al. 2023). So the
kernels see whole packs: documents and sliding windows are exact at any length.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface

from ftkit.errors import TrainingError
from ftkit.train.model.attention import masked_attention, refuse_changed_scores, varlen_attention
from ftkit.train.private_apis.torch import process_group

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ftkit.train.model.attention import Kernel
    from ftkit.train.world import ContextGroup

_NAME = "ftkit_context_parallel"
"""Name of this attention function in transformers."""
_LAYER_TYPES = {"full_attention", "sliding_attention"}
"""Types of layers in which only attention mixes tokens, with masks that `cu_seqlens` and a window describe."""


def check_context_parallel(config: PretrainedConfig, kernel: Kernel, size: int, tensor_parallel: int = 1) -> None:
    """Check that a model's tokens can be divided among `size` ranks, each with its part of the heads.

    Raises:
        TrainingError: parts of the model other than attention mix tokens, or its heads can't be divided.
    """
    heads = config.num_attention_heads
    others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        reason = f"its layers of type {', '.join(sorted(others))} carry a state from token to token"
    elif kernel not in {"flash4", "sdpa"}:
        reason = f"its attention needs the kernel '{kernel}', which does not take packs by 'cu_seqlens'"
    elif heads % (size * tensor_parallel):
        reason = f"its {heads} attention heads can't be divided among {size * tensor_parallel} GPUs"
    else:
        return
    raise TrainingError(
        f"training.context_parallel={size} can't train a '{config.model_type}': {reason}",
        fix="leave training.context_parallel out, or choose a divisor of the number of attention heads",
    )


def context_parallel_attention(kernel: Kernel, group: ContextGroup) -> str:
    """Register attention over all tokens of a group with transformers; return its name there."""
    AttentionInterface.register(_NAME, partial(_attention, kernel=kernel, group=group.name, size=group.size))
    return _NAME


def _attention(  # noqa: PLR0913 - the interface is transformers'
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kernel: Kernel,
    group: str,
    size: int,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention within documents over the tokens of all ranks of a group.

    Shapes: query [B, H, S, D], key and value [B, K, S, D], with S tokens of each pack; returns [B, S, H, D].
    `cu_seq_lens_q` has the offsets in the full packs.
    """
    refuse_changed_scores(module, others)
    del attention_mask
    batch, heads, tokens, width = query.shape
    key, value = (_repeat_heads(tensor, size) for tensor in (key, value))
    parts = [tensor.transpose(1, 2).reshape(batch, tokens, size, -1) for tensor in (query, key, value)]
    widths = [part.shape[-1] for part in parts]
    sent = torch.cat(parts, dim=-1).permute(2, 0, 1, 3).contiguous()
    received = all_to_all(sent, group).transpose(0, 1)  # [B, size, S, ...]
    queries, keys, values = (
        part.reshape(batch * size * tokens, -1, each.shape[-1])
        for part, each in zip(received.split(widths, dim=-1), (query, key, value), strict=True)
    )
    scale = scaling if scaling is not None else 1 / math.sqrt(width)
    if kernel == "flash4":
        output, _ = varlen_attention(queries, keys, values, cu_seq_lens_q, max_length_q, scale, sliding_window)
    else:
        output = masked_attention(queries, keys, values, cu_seq_lens_q, scale, sliding_window)
    sent = output.view(batch, size, tokens, -1).transpose(0, 1).contiguous()
    received = all_to_all(sent, group).permute(1, 2, 0, 3)  # [B, S, size, ...]
    return received.reshape(batch, tokens, heads, -1), None


def _repeat_heads(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Repeat key-value heads, [B, K, S, D], so that each of `size` ranks gets one for its query heads."""
    times = size // math.gcd(size, tensor.shape[1])
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)


# An operator: the compiler doesn't trace into it, so its argument is the group's name.
@torch.library.custom_op("ftkit::all_to_all", mutates_args=())
def all_to_all(sent: torch.Tensor, group: str) -> torch.Tensor:
    """Send the i-th part of a contiguous tensor, [size, ...], to rank i of a group; return the received parts."""
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=process_group(group))
    return received


@all_to_all.register_fake
def _(sent: torch.Tensor, _: str) -> torch.Tensor:
    return torch.empty_like(sent)


def _save_group(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
    del output
    ctx.group = inputs[1]


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return all_to_all(gradient.contiguous(), ctx.group), None


all_to_all.register_autograd(_backward, setup_context=_save_group)
