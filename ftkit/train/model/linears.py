"""The linear layers that adapters and quantized weights know: torch's, and those of GPT-2's and Falcon's classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import nn
from transformers.pytorch_utils import Conv1D

from ftkit.train.model.build import find_decoder_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

_SAME_AS_LINEAR = ("FalconLinear",)
"""Subclasses of `nn.Linear` that compute the same. Others, such as routers, compute something else."""


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of inputs and outputs of a linear layer; None for any other module."""
    if isinstance(module, Conv1D):
        return cast("tuple[int, int]", tuple(module.weight.shape))
    if type(module) is nn.Linear or type(module).__name__ in _SAME_AS_LINEAR:
        linear = cast("nn.Linear", module)
        return linear.in_features, linear.out_features
    return None


def is_transposed(module: nn.Module) -> bool:
    """Return whether a linear layer stores its matrix as [inputs, outputs], which peft calls `fan_in_fan_out`."""
    return isinstance(module, Conv1D)


def linears_in_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[int, int]]]:
    """Yield the linear layers of the decoder layers, each with its name in the layer and its sizes."""
    for layer in find_decoder_layers(model):
        for name, module in layer.named_modules():
            if (sizes := linear_sizes(module)) is not None:
                yield name, module, sizes


def transposed_weights(model: Any) -> frozenset[str]:
    """Return the names of the matrices of a model without adapters that are stored as [inputs, outputs]."""
    return frozenset(f"{name}.weight" for name, module in model.named_modules() if is_transposed(module))
