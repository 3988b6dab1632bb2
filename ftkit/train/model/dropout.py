"""Dropout of which only a seed is saved for the backward pass, where masks are computed again.

`nn.Dropout` saves a mask of each input, and autograd then the dropped input of a trained matrix. The seed comes from
the device's generator without a host sync, so that recomputed layers, and a resumed run, have the same masks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ftkit.train import gpu_kernels
from ftkit.train.model.quantized_linear import opaque_zero


class Dropout(NamedTuple):
    """One draw of dropout.

    Attributes:
        seed: fp32 [2], in [0, 1).
        probability: of an element to be zero.
        features: index of a tensor's first feature, and number of all, of which other ranks may have the rest.
    """

    seed: torch.Tensor
    probability: float
    features: tuple[int, int]

    @classmethod
    def draw(cls, probability: float, inputs: torch.Tensor, rank: int = 0, num_ranks: int = 1) -> Dropout:
        """Draw dropout for inputs, [..., K], whose features may be divided among ranks with equal seeds."""
        width = inputs.shape[-1]
        # Floats: compilers store them, but would compute random integers again for each element that reads them.
        return cls(torch.rand(2, device=inputs.device), probability, (rank * width, num_ranks * width))

    def drop(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return inputs, [..., K], with dropout."""
        dropped: torch.Tensor = _Dropped.apply(inputs, *self)  # type: ignore[no-untyped-call]
        return dropped

    def multiply(self, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return `linear(drop(inputs), weight)`; of inputs, [..., K], these are saved as they are."""
        product: torch.Tensor = _DroppedProduct.apply(inputs, weight, *self)  # type: ignore[no-untyped-call]
        return product


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, seed: torch.Tensor, probability: float, features: tuple[int, int]
    ) -> torch.Tensor:
        ctx.save_for_backward(seed)
        ctx.settings = probability, features
        return gpu_kernels.drop(inputs, seed, probability, features)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (seed,) = ctx.saved_tensors
        return gpu_kernels.drop(gradient, _after(gradient, seed), *ctx.settings), None, None, None


class _DroppedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        seed: torch.Tensor,
        probability: float,
        features: tuple[int, int],
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight, seed)
        ctx.settings = probability, features
        return functional.linear(gpu_kernels.drop(inputs, seed, probability, features), weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight, seed = ctx.saved_tensors
        seed = _after(gradient, seed)
        of_inputs = of_weight = None
        if ctx.needs_input_grad[0]:
            of_inputs = gpu_kernels.drop(gradient @ weight.to(gradient.dtype), seed, *ctx.settings)
        if ctx.needs_input_grad[1]:
            dropped = gpu_kernels.drop(inputs, seed, *ctx.settings).to(gradient.dtype)
            of_weight = (gradient.flatten(0, -2).T @ dropped.flatten(0, -2)).to(weight.dtype)
        return of_inputs, of_weight, None, None, None


def _after(gradient: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Return the seed, so that a compiler, which sees forward and backward together, does not save masks of it."""
    return seed + opaque_zero(gradient) if torch.compiler.is_compiling() else seed
