"""NF4 in plain operations, of which a compiler makes a kernel that writes the matrix, and a small one for its scales.

The host spends more time around bitsandbytes' operators than a GPU within them. Uncompiled they are faster than these.
"""

from __future__ import annotations

import torch

from ftkit.planning.estimates.adapters import NF4_BLOCK, NF4_NESTED_BLOCK

_INTEGERS = {2: torch.int16, 4: torch.int32}
"""Integers as wide as the numbers of a precision."""

_WORD = 8
"""Bytes that are put together before they are written: a thread looks a scale up once for all numbers in them."""


def dequantise(
    parts: tuple[torch.Tensor, ...],
    tables: tuple[torch.Tensor, torch.Tensor],
    storage: torch.dtype,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weights of all blocks, in a row.

    Args:
        parts: bytes of the 4-bit weights, of their scales, of the scales' scales, and of the scales' mean. The first
            two fill their blocks.
        tables: the 16 numbers that 4-bit weights stand for, and the 256 that scales do.
        storage: precision of the weights.
        after: what the weights are computed after, though they don't depend on it: the other factor of their product.
            A compiler sees forward and backward at once; it would else compute the same weights once for both, and
            keep them in between, or those of several products ahead.
    """
    packed, scales, nested, mean = parts
    if after is not None:
        zero = _zero_of(after)
        packed, scales = packed | zero, scales | zero
    levels, code = tables
    scales_of_scales = nested.view(torch.float32)[: len(scales) // NF4_NESTED_BLOCK].unsqueeze(1)
    exact_scales = code[scales.int()].view(-1, NF4_NESTED_BLOCK) * scales_of_scales + mean.view(torch.float32)[0]
    per_block = exact_scales.flatten()[: 2 * len(packed) // NF4_BLOCK].unsqueeze(1)
    width = storage.itemsize
    columns = packed.view(-1, NF4_BLOCK * width // _WORD, _WORD // width // 2).int().unbind(-1)
    words = torch.zeros((), dtype=torch.int64, device=packed.device)
    for place, numbers in enumerate(number for column in columns for number in (column >> 4, column & 15)):
        bits = (levels[numbers] * per_block).to(storage).view(_INTEGERS[width]).long() & ((1 << 8 * width) - 1)
        words = words | bits << (8 * width * place)
    return words.flatten().view(storage)


def _zero_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a zero of which no compiler knows that it is one."""
    first = tensor.flatten()[0]
    return ((first > 0) & (first < 0)).to(torch.uint8)
