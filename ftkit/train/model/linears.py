"""Linear layers of torch, GPT-2 and Falcon that can be adapted or quantized, and the layer with quantized weights.

A quantized matrix is one flat parameter. Engines shard it like any other, so each rank has only its shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ftkit.config.execution import NF4_BLOCK, NF4_NESTED_BLOCK, are_quantized, is_quantized, nf4_parts, quantized_bytes
from ftkit.config.training import Quantization
from ftkit.train.model.hf_model import find_decoder, find_decoder_layers, sees_pictures
from ftkit.train.private_apis.libraries import import_bitsandbytes
from ftkit.train.private_apis.transformers import grouped_mm

if TYPE_CHECKING:
    from ftkit.train.private_apis.torch import Ctx


_SAME_AS_LINEAR = ("FalconLinear",)
"""Subclasses of `nn.Linear` with the same forward. Others, such as routers, compute something else."""


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


def owner_of_target(model: nn.Module, target: str) -> nn.Module:
    """Return the part of a model in which layers named `target` are adapted.

    In a multimodal model, this is the text model if it has such layers: the vision tower may use the same names.
    """
    if not isinstance(model, PreTrainedModel) or not sees_pictures(model):
        return model
    decoder: nn.Module = find_decoder(model)
    has_target = any(name.rpartition(".")[2] == target for name, _ in decoder.named_modules())
    return decoder if has_target else model


def split_targets(model: PreTrainedModel, targets: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the targets in the text model, and those that only the other parts of a multimodal model have."""
    targets = [*targets]
    others = [target for target in targets if sees_pictures(model) and owner_of_target(model, target) is model]
    return [target for target in targets if target not in others], others


def transposed_weights(model: nn.Module) -> frozenset[str]:
    """Return the names of the matrices of a model without adapters that are stored as [inputs, outputs]."""
    return frozenset(f"{name}.weight" for name, module in model.named_modules() if is_transposed(module))


@dataclass(frozen=True)
class WeightLayout(ABC):
    """Quantization and layout of a frozen matrix, [num_outputs, num_inputs], in its flat form, [num_stored].

    The matrices of a layer's experts, stacked, are quantized separately: each row of the stacked flat forms is one.

    The flat form has the compute dtype, `storage`, although its bits are not values of that dtype: an engine that
    all-gathers parameters in the compute dtype copies them unchanged.
    """

    kind: ClassVar[Quantization]
    num_outputs: int
    num_inputs: int
    storage: torch.dtype

    @classmethod
    def of(cls, storage: torch.dtype, num_inputs: int, num_outputs: int) -> Self | None:
        """Return the layout of a matrix of a decoder layer; None if its sizes can't be quantized."""
        return cls(num_outputs, num_inputs, storage) if is_quantized(cls.kind, num_inputs, num_outputs) else None

    @classmethod
    def of_experts(cls, storage: torch.dtype, num_inputs: int, num_outputs: int) -> Self | None:
        """Return the layout of a matrix of each expert; None if its sizes can't be quantized."""
        return cls(num_outputs, num_inputs, storage) if are_quantized(cls.kind, num_inputs, num_outputs) else None

    @property
    def num_weights(self) -> int:
        return self.num_outputs * self.num_inputs

    @property
    def num_stored(self) -> int:
        return quantized_bytes(self.kind, self.num_inputs, self.num_outputs) // self.storage.itemsize

    @abstractmethod
    def quantize(self, weight: torch.Tensor) -> torch.Tensor:
        """Quantize unsharded matrices, [..., num_outputs, num_inputs], to their flat forms, [..., num_stored]."""

    @abstractmethod
    def dequantize(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the dequantized matrices, in the compute dtype."""

    @abstractmethod
    def multiply(self, inputs: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """Multiply inputs, [..., num_inputs], by the matrix: [..., num_outputs]. Only the inputs get a gradient."""

    @abstractmethod
    def multiply_grouped(
        self, rows: torch.Tensor, stored: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """Multiply rows, [S, num_inputs], by the matrices of their experts, [S] in ascending order.

        Expert e, of [E, num_stored], has the rows before `ends[e]`, int32. Only rows get a gradient.
        """


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with a quantized matrix. It is an `nn.Linear`, so that peft adapts it.

    `is_transposed` tells whether files have the matrix as [inputs, outputs]; the quantized one is [outputs, inputs].
    """

    def __init__(
        self, layout: WeightLayout, bias: nn.Parameter | None, device: torch.device, *, is_transposed: bool = False
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layout.num_inputs, layout.num_outputs
        self.layout, self.is_transposed = layout, is_transposed
        self.register_parameter("bias", bias)
        empty = torch.empty(layout.num_stored, dtype=layout.storage, device=device)
        self.quantized = nn.Parameter(empty, requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override] # computed; a Linear has a parameter
        """The dequantized matrix, which DoRA reads for its magnitudes."""
        return self.layout.dequantize(self.quantized)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        output = self.layout.multiply(input, self.quantized)
        return output if self.bias is None else output + self.bias


def quantize_linears(layers: Iterable[nn.Module], layout_of: Callable[[int, int], WeightLayout | None]) -> None:
    """Replace linear layers within decoder layers with quantized ones; those on the meta device stay there.

    `layout_of` returns the layout of a matrix from its numbers of inputs and outputs, or None to keep the layer.
    """
    for layer in layers:
        for name, linear in list(layer.named_modules()):
            sizes = linear_sizes(linear)
            if sizes is None or (layout := layout_of(*sizes)) is None:
                continue
            weight, bias = cast("nn.Linear", linear).weight, cast("nn.Linear", linear).bias
            quantized = QuantizedLinear(layout, bias, weight.device, is_transposed=is_transposed(linear))
            if not weight.is_meta:
                quantized.quantized.data.copy_(layout.quantize(weight.data.T if is_transposed(linear) else weight.data))
            layer.set_submodule(name, quantized)


def opaque_zero(tensor: torch.Tensor) -> torch.Tensor:
    """Return a zero, uint8, that no compiler can fold: values combined with it are computed after `tensor`.

    A view with another dtype reads the tensor from memory. Otherwise, Inductor computes the tensor's first element (a
    norm over a row) again for each element that is combined with the zero.
    """
    first = (tensor.view(torch.uint8) if tensor.stride(-1) == 1 else tensor).flatten()[0]
    return ((first > 1) & (first < 1)).to(torch.uint8)


# --- NF4 -----------------------------------------------------------------------------------------
#
# bitsandbytes' 4-bit weights with double quantization. Weights, absmax and absmax2 of a matrix are in one flat
# parameter, which engines shard; bitsandbytes' own layer keeps an unsharded absmax on every rank.
#
# In eager mode, bitsandbytes' operators dequantize. Compiled layers use plain operations (`_dequantize_compiled`) that
# the compiler fuses: the host time around bitsandbytes' operators exceeds their GPU time.

_ALIGNMENT = 8
"""Offsets that are multiples of this number of elements allow loads of 16 bytes for all dtypes."""
_INTEGERS = {2: torch.int16, 4: torch.int32}
_WORD = 8  # bytes that a thread assembles per write, with one lookup of their absmax


class Nf4Layout(WeightLayout):
    """4-bit weights, the absmax of blocks, the absmax2 of blocks of absmax, and an offset."""

    kind = "nf4"

    def quantize(self, weight: torch.Tensor) -> torch.Tensor:
        if weight.ndim > 2:  # noqa: PLR2004 - experts
            stored = torch.empty(len(weight), self.num_stored, dtype=self.storage, device=weight.device)
            for row, matrix in zip(stored, weight, strict=True):
                row.copy_(self.quantize(matrix))
            return stored
        quantized, state = _bitsandbytes().quantize_4bit(
            weight.to(self.storage).contiguous(), blocksize=NF4_BLOCK, compress_statistics=True, quant_type="nf4"
        )
        values = [quantized, state.absmax, state.state2.absmax, state.offset.reshape(1)]
        flat = torch.zeros(self.num_stored, dtype=self.storage, device=weight.device)
        for part, value in zip(self.parts(flat), values, strict=True):
            content = value.flatten().view(torch.uint8)
            part[: len(content)] = content
        return flat

    def dequantize(self, flat: torch.Tensor, after: torch.Tensor | None = None) -> torch.Tensor:
        """Return the dequantized matrices; `after` is a tensor that compiled code waits for."""
        flat = flat.detach()
        if torch.compiler.is_compiling():
            sizes, tables = (self.num_outputs, self.num_inputs), _tables(flat.device)
            weights: torch.Tensor = torch.ops.ftkit.nf4_matrix(flat, *sizes, *tables, after)
            return weights
        if flat.is_meta:  # peft looks at each matrix 21 times
            return flat.new_empty(*flat.shape[:-1], self.num_outputs, self.num_inputs)
        if flat.ndim > 1:
            matrices = flat.new_empty(len(flat), self.num_outputs, self.num_inputs)
            for matrix, row in zip(matrices, flat, strict=True):
                matrix.copy_(self.dequantize(row))
            return matrices
        _bitsandbytes()  # defines the operators; bitsandbytes' wrapper around them takes more host time than they do
        operators = torch.ops.bitsandbytes
        if flat.storage_offset() % _ALIGNMENT:  # an engine may all-gather it together with others
            flat = flat.clone()
        quantized, absmax, absmax2, offset = self.parts(flat)
        blocks = -(-self.num_weights // NF4_BLOCK)
        exact_absmax = operators.dequantize_blockwise(
            absmax[:blocks],
            absmax2.view(torch.float32)[: -(-blocks // NF4_NESTED_BLOCK)],
            _tables_of(flat.device)[1],
            NF4_NESTED_BLOCK,
            torch.float32,
        )
        exact_absmax += offset.view(torch.float32)[0]
        quantized = quantized[: -(-self.num_weights // 2)].unsqueeze(1)
        # Not by rows: on CPUs the operator uses another row's absmax if a row ends within a block.
        weights = operators.dequantize_4bit(
            quantized, exact_absmax, NF4_BLOCK, "nf4", (self.num_weights,), self.storage
        )
        return weights.view(self.num_outputs, self.num_inputs)

    def multiply(self, inputs: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """Multiply by the matrix, which exists only during the product."""
        product: torch.Tensor = _Product.apply(inputs, flat, self, None)  # type: ignore[no-untyped-call]
        return product

    def multiply_grouped(
        self, rows: torch.Tensor, stored: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """Multiply rows by the matrices of their experts, all of which exist during the product."""
        del experts
        product: torch.Tensor = _Product.apply(rows, stored, self, ends)  # type: ignore[no-untyped-call]
        return product

    def parts(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the parts of a flat form, as bytes."""
        return torch.split(flat.view(torch.uint8), list(nf4_parts(self.num_weights)), dim=-1)


def _dequantize_compiled(
    flat: torch.Tensor,
    num_outputs: int,
    num_inputs: int,
    levels: torch.Tensor,
    code: torch.Tensor,
    after: torch.Tensor | None,
) -> torch.Tensor:
    """Return the matrices of flat forms, in plain operations that a compiler fuses into two kernels.

    `levels` are the 16 values of 4-bit weights, `code` the 256 values of absmax. The weights depend on `after`, the
    other factor of their matmul. Otherwise a compiler, which sees forward and backward together, would dequantize once
    for both and save the weights, or dequantize for several matmuls in advance.
    """
    layout, storage, stack = Nf4Layout(num_outputs, num_inputs, flat.dtype), flat.dtype, flat.shape[:-1]
    quantized, absmax, absmax2, offset = layout.parts(flat)
    if after is not None:
        zero = opaque_zero(after)
        quantized, absmax = quantized | zero, absmax | zero
    per_block_of_blocks = absmax2.view(torch.float32)[..., : absmax.shape[-1] // NF4_NESTED_BLOCK, None]
    mean = offset.view(torch.float32)[..., :1, None]
    exact_absmax = code[absmax.int()].view(*stack, -1, NF4_NESTED_BLOCK) * per_block_of_blocks + mean
    per_block = exact_absmax.flatten(-2)[..., : 2 * quantized.shape[-1] // NF4_BLOCK, None]
    width, device = storage.itemsize, flat.device
    columns = quantized.view(*stack, -1, NF4_BLOCK * width // _WORD, _WORD // width // 2, 1).int()
    halves = torch.arange(4, -1, -4, dtype=torch.int32, device=device)  # a byte's high bits are the first number
    numbers = columns >> halves & 15
    bits = (levels[numbers] * per_block[..., None, None]).to(storage).view(_INTEGERS[width]).long()
    places = torch.arange(0, 8 * _WORD, 8 * width, device=device).view(-1, 2)
    # A sum is one node of the graph. Of a chain of 30 operations, Inductor would keep an intermediate result.
    words = ((bits & ((1 << 8 * width) - 1)) << places).sum((-1, -2))
    return words.flatten(-2).view(storage)[..., : layout.num_weights].reshape(*stack, num_outputs, num_inputs)


# A composite operator: the compiler decomposes it when it differentiates a layer, and caches the result for later
# starts. Tracing its operations in Python for each matrix of a layer would take seconds at each start.
_OPERATORS = torch.library.Library("ftkit", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPERATORS.define(  # type: ignore[no-untyped-call]
    "nf4_matrix(Tensor flat, int num_outputs, int num_inputs, Tensor levels, Tensor code, Tensor? after) -> Tensor"
)
_OPERATORS.impl("nf4_matrix", _dequantize_compiled, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """A matmul with a matrix that is dequantized again in the backward pass; with `ends`, of rows with experts'.

    Autograd saves the parameter instead of views of it: an engine may free and all-gather it in between.
    """

    @staticmethod
    def forward(
        ctx: Ctx, inputs: torch.Tensor, quantized: torch.Tensor, layout: Nf4Layout, ends: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(quantized, *(() if ends is None else (ends,)))
        ctx.layout = layout
        weight = layout.dequantize(quantized, after=inputs)
        return functional.linear(inputs, weight) if ends is None else grouped_mm(inputs, weight.mT, ends)

    @staticmethod
    def backward(ctx: Ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        quantized, *ends = ctx.saved_tensors
        weight = ctx.layout.dequantize(quantized, after=gradient)
        return grouped_mm(gradient, weight, *ends) if ends else gradient @ weight, None, None, None


def _bitsandbytes() -> Any:
    return import_bitsandbytes("method 'qlora'")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return _tables_of(device)


@cache
def _tables_of(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of 4-bit codes, and the values of an 8-bit absmax."""
    functions = _bitsandbytes()
    return functions.get_4bit_type("nf4", device=device), functions.create_dynamic_map().to(device)
