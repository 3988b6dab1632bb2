"""Frozen experts in FP8: weights with a scale for each row of each expert's matrix, multiplied in FP8.

As in `ftkit.train.model.float8`, but in grouped products: `torch._scaled_grouped_mm`, which takes a scale for each row.
On CPUs, which have none, the factors are rounded to FP8 and multiplied in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from ftkit.errors import PrerequisiteError
from ftkit.train.model.float8 import Scaled, round_rows
from ftkit.train.model.quantized_linear import opaque_zero
from ftkit.train.private_apis.torch import scaled_grouped_mm
from ftkit.train.private_apis.transformers import grouped_mm

_FIRST_CAPABILITY = (9, 0)


def check_fp8_experts(device: torch.device) -> None:
    """Raise unless a device multiplies experts in FP8; CPUs emulate it.

    Raises:
        PrerequisiteError: the GPU is older than Hopper.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
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
        numbers, scales = round_rows(weights.to(self.storage).flatten(0, 1))
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
        product: torch.Tensor = cast("Any", _Product).apply(rows, stored, expert_of_row, ends, self)
        return product


class _Product(torch.autograd.Function):
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
        return _multiply(round_rows(rows), numbers, scales, expert_of_row, ends, rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        stored, expert_of_row, ends = ctx.saved_tensors
        numbers, scales = ctx.layout.parts(stored)
        # The sum runs over the matrices' rows, so their scales belong to the gradient.
        rounded = round_rows(gradient * scales[expert_of_row])
        # FP8 is summed along the last dimension of both factors. Compilers would transpose in the forward pass, and
        # save the copy, unless it depended on the backward pass.
        turned = (numbers.view(torch.uint8) | opaque_zero(gradient)).mT.contiguous().view(numbers.dtype)
        ones = torch.ones(turned.shape[:2], device=turned.device)
        return _multiply(rounded, turned, ones, expert_of_row, ends, gradient.dtype), None, None, None, None


def _multiply(
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
