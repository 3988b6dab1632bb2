"""Short causal convolutions on packed documents, in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers.activations import ACT2FN


def convolve_documents(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Convolve each channel of [B, D, T] over the last K tokens of the same document.

    Compilers fuse the K products. Weight: [D, K]; `seq_idx`: [B, T], the document of each token.
    """
    width = weight.shape[-1]
    inputs = hidden_states.to(weight.dtype)
    total = inputs * weight[:, -1, None]
    for distance in range(1, width):
        shifted = functional.pad(inputs, (distance, 0))[..., : inputs.shape[-1]]
        before = functional.pad(seq_idx, (distance, 0), value=-1)[..., : inputs.shape[-1]]
        total = total + torch.where((before == seq_idx)[:, None], shifted, 0) * weight[:, -1 - distance, None]
    if bias is not None:
        total = total + bias[:, None]
    if activation is not None:
        total = ACT2FN[activation](total)
    return total.to(hidden_states.dtype)
