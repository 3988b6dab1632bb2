"""Matmuls of trained weights in MXFP8: 32 neighbors along the inner dimension share a power of two as their scale.

The format is that of the OCP Microscaling Formats specification 1.0 (2023): e4m3 numbers with e8m0 scales. Blackwell
and newer GPUs multiply it. On CPUs, the factors are rounded and multiplied in fp32. docs/adr/0053 says what is not
measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from ftkit.config.execution import MXFP8_BLOCK
from ftkit.errors import PrerequisiteError
from ftkit.train.model.float8 import LARGEST, Fp8Linear, replace_linears
from ftkit.train.model.quantized_linear import opaque_zero

if TYPE_CHECKING:
    from collections.abc import Iterable

_FIRST_CAPABILITY = (10, 0)
_BIAS, _NAN, _MANTISSA_BITS = 127, 255, 23
"""Of exponents in fp32 and e8m0: their bias, the one of non-finite numbers; and the bits after it in fp32."""
_LARGEST_EXPONENT = 8
"""Of e4m3: its largest number is 1.75 × 2^8."""


def check_mxfp8(device: torch.device) -> None:
    """Raise unless a device multiplies in MXFP8; CPUs emulate it.

    Raises:
        PrerequisiteError: the GPU is older than Blackwell, or torch than 2.10.
    """
    if device.type != "cuda":
        return
    if torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        raise PrerequisiteError(
            f"{torch.cuda.get_device_name(device)} does not multiply in MXFP8",
            meaning="Blackwell and newer GPUs do",
            fix="set training.precision=fp8, or bf16",
        )
    if not hasattr(functional, "scaled_mm"):
        raise PrerequisiteError(
            f"torch {torch.__version__} does not multiply in MXFP8",
            meaning="torch 2.10 and newer do",
            fix="use an image with a newer torch, or set training.precision=fp8",
        )


def convert_linears_to_mxfp8(layers: Iterable[nn.Module]) -> None:
    """Run forward and backward of linear layers within decoder layers in MXFP8; other sizes than whole blocks stay."""
    replace_linears(layers, MxLinear, MXFP8_BLOCK)


class MxLinear(Fp8Linear):
    """A trained linear layer whose three matmuls, forward and backward, are in MXFP8."""

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows, [M, inputs], by the matrix."""
        product: torch.Tensor = cast("Any", _Product).apply(rows, self.weight)
        return product


class Blocks(NamedTuple):
    """A matrix, [M, K], in e4m3, and the biased exponents of its scales, uint8 [M, K / 32]; 255 is NaN."""

    numbers: torch.Tensor
    exponents: torch.Tensor


def round_blocks(matrix: torch.Tensor) -> Blocks:
    """Round a matrix; each block's scale is the power of two that its largest number exceeds, less that of e4m3's."""
    blocks = matrix.float().reshape(len(matrix), -1, MXFP8_BLOCK)
    largest = blocks.abs().amax(dim=2).view(torch.int32) >> _MANTISSA_BITS
    exponents = (largest - _LARGEST_EXPONENT).clamp(min=0)
    inverse = ((2 * _BIAS - exponents) << _MANTISSA_BITS).view(torch.float32)
    numbers = (blocks * inverse[..., None]).clamp(-LARGEST, LARGEST).flatten(1).to(torch.float8_e4m3fn)
    return Blocks(numbers, exponents.where(largest < _NAN, _NAN).to(torch.uint8))


def dequantize(blocks: Blocks) -> torch.Tensor:
    """Return the numbers of a matrix in fp32."""
    scales = torch.exp2(blocks.exponents.float() - _BIAS).where(blocks.exponents < _NAN, torch.nan)
    return (blocks.numbers.float().view(*scales.shape, MXFP8_BLOCK) * scales[..., None]).flatten(1)


def in_tiles(exponents: torch.Tensor) -> torch.Tensor:
    """Return scales, [M, C], in the order in which cuBLAS reads them, e8m0 and padded with zeros.

    Tiles of 128 rows and 4 columns are one after the other; in a tile, rows that are 32 apart are neighbors ("1D block
    scaling factors layout" of cuBLAS).
    """
    rows, columns = exponents.shape
    padded = functional.pad(exponents, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.flatten().view(torch.float8_e8m0fnu)


def _multiply(left: Blocks, right: Blocks, dtype: torch.dtype) -> torch.Tensor:
    """Multiply [M, K] by the transpose of [N, K]."""
    if left.numbers.device.type == "cpu":
        return (dequantize(left) @ dequantize(right).t()).to(dtype)
    scaling, swizzle = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
    return functional.scaled_mm(
        left.numbers,
        right.numbers.t(),
        in_tiles(left.exponents), scaling, in_tiles(right.exponents), scaling, swizzle, swizzle,
        output_dtype=dtype,
    )  # fmt: skip


class _Product(torch.autograd.Function):
    """A matmul with a trained matrix. Blocks are along the inner dimension, so each use of a factor rounds it anew."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return _multiply(round_blocks(inputs), round_blocks(weight), inputs.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # A compiler would transpose in the forward pass, and keep the copies, if they didn't depend on the gradient.
        inputs, weight = (each + opaque_zero(gradient) for each in ctx.saved_tensors)
        of_inputs = _multiply(round_blocks(gradient), round_blocks(weight.t()), gradient.dtype)
        columns = [functional.pad(each, (0, 0, 0, -len(each) % MXFP8_BLOCK)).t() for each in (gradient, inputs)]
        of_weight = _multiply(round_blocks(columns[0]), round_blocks(columns[1]), gradient.dtype)
        return of_inputs, of_weight
