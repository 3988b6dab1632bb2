"""Attention kernels: the fastest one that the device has and that knows where documents end."""

from __future__ import annotations

import importlib.util
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import AttentionInterface

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from ftkit.specs.training import AttentionChoice

Kernel = Literal["flash4", "flex", "sdpa"]

IMPLEMENTATIONS: dict[Kernel, str] = {"flash4": "ftkit_varlen", "flex": "flex_attention", "sdpa": "sdpa"}
"""What transformers calls each kernel."""

_HOPPER = (9, 0)


def choose_kernel(wanted: AttentionChoice, device: torch.device) -> tuple[Kernel, str]:
    """Return the kernel to use, and why.

    flash-attn-4 runs on Hopper and newer and takes packed documents of any length; flex attention is compiled for
    any CUDA device; torch's own SDPA runs everywhere, with a mask of sequence length squared.
    """
    if wanted != "auto":
        return wanted, "the recipe asks for it"
    if device.type != "cuda":
        return "sdpa", "the one that runs on processors"
    has_package = importlib.util.find_spec("flash_attn") is not None and _has_cute()
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
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within documents: transformers' interface to flash-attn-4.

    Shapes: query [B, H, T, D], key and value [B, K, T, D]; returns [B, T, H, D].
    """
    del module, attention_mask, unused
    batch, _, length, width = query.shape
    flat = [tensor.transpose(1, 2).reshape(batch * length, -1, width) for tensor in (query, key, value)]
    scale = scaling if scaling is not None else 1 / math.sqrt(width)
    window = (None, None) if sliding_window is None else (sliding_window - 1, 0)
    output = _varlen(flat, cu_seq_lens_q, max_length_q, scale, window)
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


@torch.compiler.disable  # type: ignore[untyped-decorator] # torch ships no type for it
def _varlen(
    flat: list[torch.Tensor],
    borders: torch.Tensor | None,
    longest: int | None,
    scale: float,
    window: tuple[int | None, int | None],
) -> torch.Tensor:
    from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found] # noqa: PLC0415 - only on GPUs

    output = flash_attn_varlen_func(
        *flat,
        cu_seqlens_q=borders,
        cu_seqlens_k=borders,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scale,
        causal=True,
        window_size=window,
    )
    result: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return result


AttentionInterface.register(IMPLEMENTATIONS["flash4"], _flash4)
