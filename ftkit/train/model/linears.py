"""Linear layers that can be adapted or quantized, in torch, GPT-2 and Falcon; and the layer with quantized weights.

A quantized matrix is one flat parameter. Engines shard it like any other, so each rank has only its shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ftkit.config.execution import is_quantized, quantized_bytes
from ftkit.config.training import Quantization
from ftkit.train.model.build import find_decoder_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


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


@dataclass(frozen=True)
class WeightLayout(ABC):
    """Quantization and layout of a frozen matrix, [num_outputs, num_inputs], in its flat form, [num_stored].

    The dtype of the flat form, `storage`, is the compute dtype, though its bits are not numbers of it: an engine that
    all-gathers parameters in that dtype copies them unchanged.
    """

    kind: ClassVar[Quantization]
    num_outputs: int
    num_inputs: int
    storage: torch.dtype

    @classmethod
    def of(cls, storage: torch.dtype, num_inputs: int, num_outputs: int) -> Self | None:
        """Return the layout of a matrix of a decoder layer; None if its sizes can't be quantized."""
        return cls(num_outputs, num_inputs, storage) if is_quantized(cls.kind, num_inputs, num_outputs) else None

    @property
    def num_weights(self) -> int:
        """Weights of the matrix."""
        return self.num_outputs * self.num_inputs

    @property
    def num_stored(self) -> int:
        """Elements of the flat form."""
        return quantized_bytes(self.kind, self.num_inputs, self.num_outputs) // self.storage.itemsize

    @abstractmethod
    def quantize(self, weight: torch.Tensor) -> torch.Tensor:
        """Quantize an unsharded matrix to its flat form."""

    @abstractmethod
    def dequantize(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the dequantized matrix, in the compute dtype."""

    @abstractmethod
    def multiply(self, inputs: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """Multiply inputs, [..., num_inputs], by the matrix: [..., num_outputs]. Only the inputs get a gradient."""


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with a quantized matrix. It is a `nn.Linear`, so that peft adapts it as one.

    Attributes:
        is_transposed: whether files have the matrix as [inputs, outputs]; the quantized one is [outputs, inputs].
    """

    def __init__(
        self,
        layout: WeightLayout,
        bias: nn.Parameter | None,
        device: torch.device,
        *,
        is_transposed: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layout.num_inputs, layout.num_outputs
        self.layout, self.is_transposed = layout, is_transposed
        self.register_parameter("bias", bias)
        empty = torch.empty(layout.num_stored, dtype=layout.storage, device=device)
        self.quantized = nn.Parameter(empty, requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override] # computed, where a Linear holds a parameter
        """The dequantized matrix, whose magnitude DoRA uses."""
        return self.layout.dequantize(self.quantized)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Multiply by the matrix."""
        output = self.layout.multiply(input, self.quantized)
        return output if self.bias is None else output + self.bias

    def extra_repr(self) -> str:
        """Describe the layer as torch prints modules."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.layout.kind}"


def quantize_linears(layers: Iterable[nn.Module], layout_of: Callable[[int, int], WeightLayout | None]) -> None:
    """Replace linear layers within decoder layers with quantized ones; those on the meta device stay there.

    Args:
        layers: decoder layers.
        layout_of: returns the layout of a matrix from its numbers of inputs and outputs, or None to keep the layer.
    """
    for layer in layers:
        for name, linear in list(layer.named_modules()):
            sizes = linear_sizes(linear)
            layout = None if sizes is None else layout_of(*sizes)
            if layout is None:
                continue
            weight, bias = cast("Any", linear).weight, cast("Any", linear).bias
            quantized = QuantizedLinear(layout, bias, weight.device, is_transposed=is_transposed(linear))
            if not weight.is_meta:
                by_output = weight.data.T if quantized.is_transposed else weight.data
                quantized.quantized.data.copy_(layout.quantize(by_output))
            layer.set_submodule(name, quantized)


def opaque_zero(tensor: torch.Tensor) -> torch.Tensor:
    """Return a zero, uint8, that no compiler can fold: values combined with it are computed after `tensor`."""
    first = tensor.flatten()[0]
    return ((first > 0) & (first < 0)).to(torch.uint8)
