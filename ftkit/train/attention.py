"""Attention kernels: the fastest one that the device has and that knows where documents end."""

from __future__ import annotations

import importlib.util
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import AttentionInterface

from ftkit.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from ftkit.specs.training import AttentionChoice, Precision

Kernel = Literal["flash4", "flex", "sdpa"]

IMPLEMENTATIONS: dict[Kernel, str] = {"flash4": "ftkit_varlen", "flex": "flex_attention", "sdpa": "sdpa"}
"""What transformers calls each kernel."""

_HOPPER = (9, 0)
_UNKNOWN_TO_FLASH4 = ("softcap", "s_aux", "position_bias")
"""What some models pass to a kernel to change the scores: caps, sinks, biases."""


def choose_kernel(wanted: AttentionChoice, precision: Precision, device: torch.device) -> tuple[Kernel, str]:
    """Return the kernel to use, and why.

    flash-attn-4 runs on Hopper and newer, in bf16, and takes packed documents of any length; flex attention is
    compiled for any CUDA device; torch's own SDPA runs everywhere, with a mask of sequence length squared.
    """
    if wanted != "auto":
        return wanted, "the recipe asks for it"
    if device.type != "cuda":
        return "sdpa", "the one that runs on processors"
    has_package = importlib.util.find_spec("flash_attn") is not None and _has_cute()
    if precision == "fp32":
        return "flex", "CUDA, in fp32"
    if has_package and torch.cuda.get_device_capability(device) >= _HOPPER:
        return "flash4", f"{torch.cuda.get_device_name(device)} and flash-attn-4 is installed"
    return "flex", "CUDA without flash-attn-4"


def _has_cute() -> bool:
    return importlib.util.find_spec("flash_attn.cute") is not None


def _flash4(  # noqa: PLR0913 - the interface is transformers'
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within documents: transformers' interface to flash-attn-4.

    Shapes: query [B, H, T, D], key and value [B, K, T, D]; returns [B, T, H, D].
    """
    for name in _UNKNOWN_TO_FLASH4:
        if unused.get(name) is not None:
            raise TrainingError(
                f"{type(module).__name__} changes its attention scores ('{name}'), which flash-attn-4 is not told",
                fix="set training.attention=flex",
            )
    del module, attention_mask, unused
    batch, _, length, width = query.shape
    flat = [tensor.transpose(1, 2).reshape(batch * length, -1, width) for tensor in (query, key, value)]
    scale = scaling if scaling is not None else 1 / math.sqrt(width)
    output, _ = _varlen(*flat, cu_seq_lens_q, max_length_q, scale, sliding_window)
    return output.view(batch, length, -1, width), None


@contextmanager
def plain_attention(model: PreTrainedModel) -> Iterator[None]:
    """Generate text: with a cache and a mask, which the kernels for packs don't know, and shapes that always change."""
    chosen = model.config._attn_implementation  # noqa: SLF001 - transformers has no public name to read it by
    model.set_attn_implementation(IMPLEMENTATIONS["sdpa"])
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.set_attn_implementation(chosen)


# Operators, which a compiled layer takes in whole and activation checkpointing can keep the output of. The package's
# public function is opaque to both; hence its private ones.
@torch.library.custom_op("ftkit::varlen_attention", mutates_args=())
def _varlen(  # noqa: PLR0913, PLR0917 - operators take tensors and numbers alone
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    scale: float,
    sliding_window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, [B * T, H, D], and the logarithms of the sums of weights, fp32 [H, B * T]."""
    from flash_attn.cute.interface import _flash_attn_fwd  # type: ignore[import-not-found] # noqa: PLC0415 - on GPUs

    output, log_sums, *_ = _flash_attn_fwd(
        query, key, value, return_lse=True, **_options(borders, longest, scale, sliding_window)
    )
    return output, log_sums


@torch.library.custom_op(
    "ftkit::varlen_attention_backward",
    mutates_args=(),
    # Written out since torch 2.6 does not understand list[Tensor].
    schema="(Tensor gradient, Tensor[] kept, Tensor borders, int longest, float scale, int? sliding_window)"
    " -> (Tensor, Tensor, Tensor)",
)
def _varlen_backward(
    gradient: torch.Tensor,
    kept: list[torch.Tensor],
    borders: torch.Tensor,
    longest: int,
    scale: float,
    sliding_window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value; `kept` are these, the output and the logarithms of sums."""
    from flash_attn.cute.interface import _flash_attn_bwd  # noqa: PLC0415 - on GPUs

    query, key, value, output, log_sums = kept
    options = _options(borders, longest, scale, sliding_window)
    gradients = _flash_attn_bwd(query, key, value, output, gradient, log_sums, **options)
    of_query, of_key, of_value = (tensor.contiguous() for tensor in gradients[:3])
    return of_query, of_key, of_value


def _options(borders: torch.Tensor, longest: int, scale: float, sliding_window: int | None) -> dict[str, Any]:
    return {
        "cu_seqlens_q": borders,
        "cu_seqlens_k": borders,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "softmax_scale": scale,
        "causal": True,
        "window_size_left": None if sliding_window is None else sliding_window - 1,
        "window_size_right": None if sliding_window is None else 0,
    }


@_varlen.register_fake
def _(query: torch.Tensor, _: torch.Tensor, value: torch.Tensor, *__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    length, heads, _width = query.shape
    return query.new_empty(length, heads, value.shape[-1]), query.new_empty(heads, length, dtype=torch.float32)


@_varlen_backward.register_fake
def _(_: torch.Tensor, kept: list[torch.Tensor], *__: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    of_query, of_key, of_value = (tensor.new_empty(tensor.shape) for tensor in kept[:3])
    return of_query, of_key, of_value


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, borders, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, *output, borders)


def _gradients(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *kept, borders = ctx.saved_tensors
    return (*_varlen_backward(gradient, kept, borders, *ctx.settings), None, None, None, None)


_varlen.register_autograd(_gradients, setup_context=_keep_for_backward)
AttentionInterface.register(IMPLEMENTATIONS["flash4"], _flash4)
