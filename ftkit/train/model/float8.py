"""Matmuls in FP8 (Micikevicius et al. 2022), of trained weights and of frozen weights stored in 8 bits.

Weights and activations are e4m3, gradients of trained layers e5m2, as torchao's tensorwise recipe has them.
`torch._scaled_mm` multiplies them and returns the compute dtype; `torch._scaled_grouped_mm` multiplies frozen experts,
with a scale for each row. On CPUs, which have no such matmuls, the factors are rounded to FP8 and multiplied in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from ftkit.config.execution import FP8_MULTIPLE, ROUTERS, is_gathered_in_fp8, quantized_bytes
from ftkit.errors import PrerequisiteError
from ftkit.train.gpu_kernels import round_and_transpose, transpose
from ftkit.train.model.linears import opaque_zero
from ftkit.train.model.local_shard import FP8, Fp8Shard, Fp8Weight, local_tensor
from ftkit.train.private_apis.torch import find_norms, scaled_grouped_mm, scaled_mm
from ftkit.train.private_apis.transformers import grouped_mm

if TYPE_CHECKING:
    from collections.abc import Iterable


LARGEST = torch.finfo(torch.float8_e4m3fn).max
_FIRST_CAPABILITY = (8, 9)
_FIRST_CAPABILITY_OF_EXPERTS = (9, 0)
_SLOT = 4
"""Numbers from one gathered matrix's scale to the next: cuBLAS takes only scales at multiples of 16 bytes."""
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
                if type(module) is not nn.Linear or name in ROUTERS:
                    continue
                if module.in_features % FP8_MULTIPLE == 0 and module.out_features % FP8_MULTIPLE == 0:
                    setattr(parent, name, Fp8Linear(module))


class GatheredScales:
    """Scales of the trained matrices that FSDP2 all-gathers in FP8: one for each matrix, the same on all ranks."""

    def __init__(self, layers: Iterable[nn.Module], device: torch.device) -> None:
        """Prepare the matrices of converted layers, which are sharded after that."""
        linears = [
            module
            for layer in layers
            for name, module in layer.named_modules()
            if isinstance(module, Fp8Linear)
            and is_gathered_in_fp8(name.rpartition(".")[2], module.in_features, module.out_features)
        ]
        self._linears, self._scales = linears, torch.ones(len(linears), _SLOT, device=device)[:, 0]
        for linear, scale in zip(linears, self._scales, strict=True):
            linear.weight = nn.Parameter(Fp8Shard(linear.weight.detach(), scale))

    @torch.no_grad()
    def update(self, group: dist.ProcessGroup) -> None:
        """Compute the scales from the sharded matrices. Collective, without a host sync."""
        if not self._linears:  # no layer has both sizes divisible by `FP8_MULTIPLE`
            return
        shards = [local_tensor(linear.weight) for linear in self._linears]
        filled = [shard if shard.numel() else self._scales.new_zeros(1) for shard in shards]
        maxima = torch.stack(find_norms(filled, math.inf))
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group)
        self._scales.copy_(_scale_for(maxima.bfloat16(), FP8))  # the matrices of a single process are in bf16


class Fp8Linear(nn.Linear):
    """A trained linear layer whose three matmuls, forward and backward, are in FP8."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Multiply by the matrix; inputs, matrix and gradients are rounded with one scale each."""
        rows, weight = input.flatten(0, -2), self.weight
        product: torch.Tensor = (
            cast("Any", _GatheredProduct).apply(rows, weight, weight.numbers, weight.scale)
            if isinstance(weight, Fp8Weight)
            else cast("Any", _TrainedProduct).apply(rows, weight)
        )
        output = product.view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


class _TrainedProduct(torch.autograd.Function):
    """A matmul with a trained matrix."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return _multiply(_round(inputs), _round(weight), inputs.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, weight = ctx.saved_tensors
        return _gradients(inputs, _round(weight), gradient)


class _GatheredProduct(torch.autograd.Function):
    """A matmul with a trained matrix that was all-gathered in FP8; `weight` is what gets the gradient."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        del weight
        ctx.save_for_backward(inputs, numbers, scale)
        return _multiply(_round(inputs), Scaled(numbers, scale), inputs.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        inputs, *weight = ctx.saved_tensors
        return *_gradients(inputs, Scaled(*weight), gradient), None, None


def _gradients(inputs: torch.Tensor, weight: Scaled, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of a trained matrix's inputs, and its own."""
    scale = _scale_of(gradient, torch.float8_e5m2)
    rows, columns = (Scaled(each, scale) for each in round_and_transpose(gradient, scale, torch.float8_e5m2))
    weight_columns = _transpose(weight, after=gradient)
    input_columns = _transpose(_round(inputs), after=gradient, is_fusible=False)
    of_inputs = _multiply(rows, weight_columns, gradient.dtype, is_fast=False)
    of_weight = _multiply(columns, input_columns, gradient.dtype, is_fast=False)
    return of_inputs, of_weight


class _Product(torch.autograd.Function):
    """A matmul with a frozen matrix. Autograd saves the parameter, not views of it, because an engine may free it."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, flat: torch.Tensor, layout: Fp8Layout) -> torch.Tensor:
        ctx.save_for_backward(flat)
        ctx.layout = layout
        return _multiply(_round(inputs, by_row=True), layout.parts(flat), inputs.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        weight = ctx.layout.parts(*ctx.saved_tensors)
        # The sum runs over the matrix's rows, so their scales belong to the gradient.
        rounded = _round(gradient * weight.scale.t(), by_row=True)
        unscaled = Scaled(weight.numbers, torch.ones(weight.numbers.shape[1], 1, device=gradient.device))
        return _multiply(rounded, _transpose(unscaled, after=gradient), gradient.dtype), None, None


class Scaled(NamedTuple):
    """A matrix, [M, K], in FP8, and what its numbers are multiplied by, fp32: [], or a scale for each row, [M, 1]."""

    numbers: torch.Tensor
    scale: torch.Tensor


def _round(matrix: torch.Tensor, *, by_row: bool = False) -> Scaled:
    """Round a matrix to e4m3, with one scale or one for each row."""
    scale = _scale_of(matrix, torch.float8_e4m3fn, by_row=by_row)
    return Scaled((matrix.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale)


def _scale_of(matrix: torch.Tensor, dtype: torch.dtype, *, by_row: bool = False) -> torch.Tensor:
    return _scale_for(matrix.abs().amax(dim=1, keepdim=True) if by_row else matrix.abs().amax(), dtype)


def _scale_for(maximum: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return maximum.float().clamp_min(_SMALLEST_MAXIMUM) / torch.finfo(dtype).max


def _transpose(matrix: Scaled, *, after: torch.Tensor, is_fusible: bool = True) -> Scaled:
    """Copy a matrix into its transpose, because GPUs sum products of FP8 only along the last dimension of both factors.

    A compiler, which sees forward and backward at once, would do it in the forward pass, and keep the copies, unless
    they depended on something of the backward pass.

    Args:
        matrix: the matrix.
        after: of the backward pass.
        is_fusible: whether a compiler may do it together with other operations on what the matrix is rounded from.
    """
    numbers = matrix.numbers.view(torch.uint8) | opaque_zero(after)
    transposed = numbers.t().contiguous() if is_fusible else transpose(numbers)
    return Scaled(transposed.view(matrix.numbers.dtype), matrix.scale)


def _multiply(left: Scaled, right: Scaled, dtype: torch.dtype, *, is_fast: bool = True) -> torch.Tensor:
    """Multiply [M, K] by the transpose of [N, K]; without `is_fast`, partial sums are more precise."""
    if left.numbers.device.type == "cpu":
        product = left.numbers.float() @ right.numbers.float().t()
        return (product * left.scale * right.scale.t()).to(dtype)
    return scaled_mm(
        left.numbers,
        right.numbers.t(),
        scale_a=left.scale,
        scale_b=right.scale.t(),
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
        rounded = _round(weight.to(self.storage), by_row=True)
        return torch.cat([part.view(torch.uint8).flatten() for part in rounded]).view(self.storage)

    def dequantize(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the dequantized matrix."""
        weight = self.parts(flat)
        return (weight.numbers.float() * weight.scale).to(self.storage)

    def multiply(self, inputs: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """Multiply by the matrix; each token's inputs are rounded with a separate scale."""
        rows = inputs.flatten(0, -2)
        product: torch.Tensor = cast("Any", _Product).apply(rows, flat, self)
        return product.view(*inputs.shape[:-1], self.num_outputs)

    def parts(self, flat: torch.Tensor) -> Scaled:
        """Return the matrix of a flat form, with a scale for each row."""
        sizes = [self.num_outputs * self.num_inputs, 4 * self.num_outputs]
        numbers, scales = torch.split(flat.detach().view(torch.uint8), sizes)
        return Scaled(numbers.view(torch.float8_e4m3fn).view(self.num_outputs, -1), scales.view(torch.float32)[:, None])


def check_fp8_experts(device: torch.device) -> None:
    """Raise unless a device multiplies experts in FP8; CPUs emulate it.

    Raises:
        PrerequisiteError: the GPU is older than Hopper.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY_OF_EXPERTS:
        raise PrerequisiteError(
            f"{torch.cuda.get_device_name(device)} does not multiply the experts of a mixture in FP8",
            meaning="torch's grouped products in FP8 are for Hopper and newer GPUs",
            fix="leave out training.base_precision",
        )


@dataclass(frozen=True)
class Fp8Experts:
    """Layout of the matrices of a layer's experts in one tensor, with a row for each expert.

    A row has the expert's e4m3 weights, [num_outputs, num_inputs], then an fp32 scale for each output. Its dtype,
    `storage`, is the compute dtype, though its bits are not numbers of it (see `WeightLayout`).
    """

    num_experts: int
    num_inputs: int
    num_outputs: int
    storage: torch.dtype

    @property
    def num_stored(self) -> int:
        """Elements of a row."""
        return self.num_outputs * (self.num_inputs + torch.float32.itemsize) // self.storage.itemsize

    @property
    def num_weights(self) -> int:
        """Weights of all experts."""
        return self.num_experts * self.num_outputs * self.num_inputs

    def quantize(self, weights: torch.Tensor) -> torch.Tensor:
        """Quantize the matrices of some experts, [N, num_outputs, num_inputs], to their rows, [N, num_stored]."""
        num = weights.shape[0]
        numbers, scales = _round(weights.to(self.storage).flatten(0, 1), by_row=True)
        parts = (part.view(torch.uint8).view(num, -1) for part in (numbers, scales))
        return torch.cat([*parts], dim=1).view(self.storage)

    def dequantize(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the matrices of all experts, [num_experts, num_outputs, num_inputs]."""
        numbers, scales = self.parts(stored)
        return (numbers.float() * scales[..., None]).to(self.storage)

    def parts(self, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights in e4m3, and the scales, [num_experts, num_outputs]."""
        sizes = [self.num_outputs * self.num_inputs, self.num_outputs * torch.float32.itemsize]
        numbers, scales = torch.split(stored.detach().view(torch.uint8), sizes, dim=1)
        weights = numbers.view(torch.float8_e4m3fn).view(-1, self.num_outputs, self.num_inputs)
        return weights, scales.contiguous().view(torch.float32)

    def multiply(
        self, rows: torch.Tensor, stored: torch.Tensor, expert_of_row: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """Multiply rows, [S, num_inputs], sorted by expert, by the matrix of their expert; only rows get a gradient."""
        product: torch.Tensor = cast("Any", _ExpertsProduct).apply(rows, stored, expert_of_row, ends, self)
        return product


class _ExpertsProduct(torch.autograd.Function):
    """A grouped product with frozen matrices. Autograd saves the parameter, because an engine may free its views."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        stored: torch.Tensor,
        expert_of_row: torch.Tensor,
        ends: torch.Tensor,
        layout: Fp8Experts,
    ) -> torch.Tensor:
        ctx.save_for_backward(stored, expert_of_row, ends)
        ctx.layout = layout
        numbers, scales = layout.parts(stored)
        return _multiply_grouped(_round(rows, by_row=True), numbers, scales, expert_of_row, ends, rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        stored, expert_of_row, ends = ctx.saved_tensors
        numbers, scales = ctx.layout.parts(stored)
        # The sum runs over the matrices' rows, so their scales belong to the gradient.
        rounded = _round(gradient * scales[expert_of_row], by_row=True)
        # FP8 is summed along the last dimension of both factors. Compilers would transpose in the forward pass, and
        # save the copy, unless it depended on the backward pass.
        turned = (numbers.view(torch.uint8) | opaque_zero(gradient)).mT.contiguous().view(numbers.dtype)
        ones = torch.ones(turned.shape[:2], device=turned.device)
        return _multiply_grouped(rounded, turned, ones, expert_of_row, ends, gradient.dtype), None, None, None, None


def _multiply_grouped(
    rows: Scaled,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    expert_of_row: torch.Tensor,
    ends: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply rows, [S, K], by the transposes of their experts' matrices, [E, N, K], with scales [E, N]."""
    if numbers.device.type == "cpu":
        product = grouped_mm(rows.numbers.float(), numbers.float().mT, ends)
        return (product * rows.scale * scales[expert_of_row]).to(dtype)
    return scaled_grouped_mm(rows.numbers, numbers.mT, rows.scale[:, 0], scales, ends, dtype)
