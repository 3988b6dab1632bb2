"""How frozen matrices are stored in 4 or 8 bits: which of them, and in how many bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftkit.config.training import Quantization

NF4_BLOCK = 64
"""Weights that share a scale."""
FP8_MULTIPLE = 16
"""FP8 products of GPUs take matrices whose two sides are multiples of it."""
NF4_NESTED_BLOCK = 256
"""Scales that share a scale of their own: the double quantization."""


def is_quantized(quantization: Quantization, num_inputs: int, num_outputs: int) -> bool:
    """Tell whether a frozen linear layer of a decoder layer is stored quantized."""
    if quantization == "fp8":
        return num_inputs % FP8_MULTIPLE == 0 and num_outputs % FP8_MULTIPLE == 0
    return quantization == "nf4"


def quantized_bytes(quantization: Quantization, num_inputs: int, num_outputs: int) -> int:
    """Count the bytes of a quantized matrix, its scales included."""
    if quantization == "fp8":
        return num_outputs * (num_inputs + 4)
    return sum(nf4_parts(num_inputs * num_outputs))


def nf4_parts(num_weights: int) -> tuple[int, int, int, int]:
    """Return the bytes that a matrix takes in NF4: 4-bit weights, their scales, the scales of these, their mean.

    Weights and scales fill their blocks, and each part begins where a GPU can load 16 bytes at once.
    """
    blocks = -(-num_weights // NF4_BLOCK)
    nested = -(-blocks // NF4_NESTED_BLOCK)
    return blocks * NF4_BLOCK // 2, nested * NF4_NESTED_BLOCK, -(-4 * nested // 16) * 16, 16
