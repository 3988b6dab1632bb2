"""Matmuls in FP8 (Micikevicius et al. 2022), of trained weights and of frozen weights stored in 8 bits.

Weights and activations are e4m3, gradients of trained layers e5m2, as torchao's tensorwise recipe has them.
`torch._scaled_mm` multiplies them and returns the compute dtype. On CPUs, which have no such matmuls, the factors are
rounded to FP8 and multiplied in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from ftkit.config.execution import is_quantized, quantized_bytes
from ftkit.errors import PrerequisiteError
from ftkit.train.model.quantized_linear import opaque_zero
from ftkit.train.private_apis.torch import scaled_mm

if TYPE_CHECKING:
    from collections.abc import Iterable

LARGEST = torch.finfo(torch.float8_e4m3fn).max
_FIRST_CAPABILITY = (8, 9)
_ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names of routers in transformers' families: they are small, and sensitive to rounding."""
_SMALLEST_MAXIMUM = 1e-12
"""Lower bound of a row's maximum: a row of zeros would have an infinite scale."""


def check_fp8(device: torch.device) -> None:
    """Raise unless a device multiplies in FP8; CPUs emulate it.

    Raises:
        PrerequisiteError: the GPU is older than Ada and Hopper.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        raise PrerequisiteError(
            f"{torch.cuda.get_device_name(device)} does not multiply in FP8",
            meaning="Ada, Hopper and newer GPUs do",
            fix="set training.precision=bf16 and leave out training.base_precision; or use method 'qlora' for memory",
        )


def convert_linears(layers: Iterable[nn.Module]) -> None:
    """Run forward and backward of linear layers within decoder layers in FP8, with one scale for each factor.

    Weights, their names and their gradients don't change. Routers, and matrices with sizes that GPUs don't multiply in
    FP8, keep the compute dtype.

    Args:
        layers: decoder layers.
    """
    for layer in layers:
        for parent in list(layer.modules()):
            for name, module in parent.named_children():
                if type(module) is nn.Linear and _is_converted(module, name):
                    setattr(parent, name, Fp8Linear(module))


def _is_converted(linear: nn.Linear, name: str) -> bool:
    return name not in _ROUTERS and is_quantized("fp8", linear.in_features, linear.out_features)


class Fp8Linear(nn.Linear):
    """A trained linear layer whose three matmuls, forward and backward, are in FP8."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Multiply by the matrix; inputs, matrix and gradients are rounded with one scale each."""
        product = cast("Any", _TrainedProduct).apply(input.flatten(0, -2), self.weight)
        output: torch.Tensor = product.view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


class _TrainedProduct(torch.autograd.Function):
    """A matmul with a trained matrix. `torch._scaled_mm` needs the summed dimension of both factors to be the last."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return _multiply(_round_all(inputs), _round_all(weight), inputs.dtype, is_fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, weight = ctx.saved_tensors
        rounded = _round_all(gradient, torch.float8_e5m2)
        of_inputs = _multiply(rounded, _transpose(_round_all(weight)), gradient.dtype)
        of_weight = _multiply(_transpose(rounded), _transpose(_round_all(inputs)), gradient.dtype)
        return of_inputs, of_weight


class _Scaled(NamedTuple):
    """A matrix, [M, K], in FP8, and the factor, fp32 [], that gives its numbers."""

    numbers: torch.Tensor
    factor: torch.Tensor


def _round_all(matrix: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> _Scaled:
    largest = torch.finfo(dtype).max
    factor = matrix.abs().amax().float().clamp_min(_SMALLEST_MAXIMUM) / largest
    return _Scaled((matrix.float() / factor).clamp(-largest, largest).to(dtype), factor)


def _transpose(matrix: _Scaled) -> _Scaled:
    """Copy a matrix into its transpose, in a kernel of its own.

    A compiler would fuse the copy with the rounding, or with a norm before that: row by row, whose writes to a
    transposed matrix are 20 times slower than a copy in tiles (measured on an H200).
    """
    numbers = matrix.numbers.view(torch.int8)
    copied = (numbers | opaque_zero(numbers).view(torch.int8)).t().contiguous()
    return _Scaled(copied.view(matrix.numbers.dtype), matrix.factor)


def _multiply(left: _Scaled, right: _Scaled, dtype: torch.dtype, *, is_fast: bool = False) -> torch.Tensor:
    """Multiply [M, K] by the transpose of [N, K]; with `is_fast`, partial sums are less precise."""
    if left.numbers.device.type == "cpu":
        product = left.numbers.float() @ right.numbers.float().t()
        return (product * (left.factor * right.factor)).to(dtype)
    return scaled_mm(
        left.numbers,
        right.numbers.t(),
        scale_a=left.factor,
        scale_b=right.factor,
        out_dtype=dtype,
        use_fast_accum=is_fast,
    )


@dataclass(frozen=True)
class Fp8Layout:
    """Layout of a frozen matrix in its flat form: e4m3 weights, then an fp32 scale for each row."""

    num_outputs: int
    num_inputs: int
    storage: torch.dtype

    @property
    def name(self) -> str:
        """The layer's representation in torch's printout."""
        return "FP8"

    @property
    def num_stored(self) -> int:
        """Elements of the flat form."""
        return quantized_bytes("fp8", self.num_inputs, self.num_outputs) // self.storage.itemsize

    def quantize(self, weight: torch.Tensor) -> torch.Tensor:
        """Quantize a whole matrix, [num_outputs, num_inputs], to its flat form, [num_stored]."""
        rounded, scales = _round_rows(weight.to(self.storage))
        return torch.cat([rounded.view(torch.uint8).flatten(), scales.view(torch.uint8).flatten()]).view(self.storage)

    def dequantize(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the dequantized matrix."""
        weights, scales = self.parts(flat)
        return (weights.float() * scales[:, None]).to(self.storage)

    def multiply(self, inputs: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """Multiply by the matrix; each token's inputs are rounded with a separate scale."""
        rows = inputs.flatten(0, -2)
        product: torch.Tensor = cast("Any", _Product).apply(rows, flat, self)
        return product.view(*inputs.shape[:-1], self.num_outputs)

    def parts(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of a flat form, [num_outputs, num_inputs], and the scales of its rows, [num_outputs]."""
        sizes = [self.num_outputs * self.num_inputs, 4 * self.num_outputs]
        weights, scales = torch.split(flat.detach().view(torch.uint8), sizes)
        return weights.view(torch.float8_e4m3fn).view(self.num_outputs, -1), scales.view(torch.float32)


class _Product(torch.autograd.Function):
    """A matmul with a frozen matrix. Autograd saves the parameter, not views of it, because an engine may free it."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, flat: torch.Tensor, layout: Fp8Layout) -> torch.Tensor:
        ctx.save_for_backward(flat)
        ctx.layout = layout
        weights, scales = layout.parts(flat)
        return _scaled_product(*_round_rows(inputs), weights, scales, inputs.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        weights, scales = ctx.layout.parts(*ctx.saved_tensors)
        # The sum runs over the matrix's rows, so their scales belong to the gradient.
        rounded, gradient_scales = _round_rows(gradient * scales)
        ones = torch.ones(weights.shape[1], device=weights.device)
        # Otherwise a compiler, which sees forward and backward at once, would transpose in the forward pass.
        transposed = (weights.view(torch.uint8) | opaque_zero(gradient)).t().contiguous().view(weights.dtype)
        return _scaled_product(rounded, gradient_scales, transposed, ones, gradient.dtype), None, None


def _round_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix, [M, K], to e4m3 with a scale for each row; return the numbers, and the scales, fp32 [M]."""
    largest = matrix.abs().amax(dim=1, keepdim=True).float().clamp_min(_SMALLEST_MAXIMUM)
    rounded = (matrix.float() * (LARGEST / largest)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return rounded, (largest / LARGEST).squeeze(1)


def _scaled_product(
    rows: torch.Tensor, row_scales: torch.Tensor, columns: torch.Tensor, column_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply [M, K] by the transpose of [N, K], both e4m3; the scales are those of the M rows and N columns."""
    if rows.device.type == "cpu":
        return ((rows.float() @ columns.float().t()) * row_scales[:, None] * column_scales).to(dtype)
    return scaled_mm(
        rows,
        columns.t(),
        scale_a=row_scales[:, None],
        scale_b=column_scales[None],
        out_dtype=dtype,
        use_fast_accum=True,
    )
