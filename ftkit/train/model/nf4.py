"""Linear layers whose frozen weights are kept in 4 bits: bitsandbytes' NF4 with double quantisation.

All that belongs to a matrix (weights, scales, the scales' scales) lies in one flat parameter, so that any engine
shards it as it shards every other parameter, and a rank holds nothing of the matrix but its share. bitsandbytes'
own layer keeps the scales beside the weights, whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from ftkit.errors import PrerequisiteError
from ftkit.planning.estimates.adapters import NF4_BLOCK, NF4_NESTED_BLOCK, nf4_parts
from ftkit.train.model.nf4_compiled import dequantise

if TYPE_CHECKING:
    from collections.abc import Iterable

_ALIGNMENT = 8
"""Elements from which on a GPU can load 16 bytes at once, whatever the precision."""


@dataclass(frozen=True)
class Nf4Layout:
    """How a matrix lies in its flat form: 4-bit weights, their scales, the scales of these, and their mean.

    The flat form is of the compute precision, though its bits are none of its numbers: an engine that gathers
    parameters in that precision then copies them as they are.
    """

    num_outputs: int
    num_inputs: int
    storage: torch.dtype

    @property
    def num_weights(self) -> int:
        """Weights of the matrix."""
        return self.num_outputs * self.num_inputs

    @property
    def num_stored(self) -> int:
        """Elements of the flat form."""
        return sum(nf4_parts(self.num_weights)) // self.storage.itemsize

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Quantise a whole matrix."""
        packed, state = _bitsandbytes().quantize_4bit(
            weight.to(self.storage).contiguous(), blocksize=NF4_BLOCK, compress_statistics=True, quant_type="nf4"
        )
        values = [packed, state.absmax, state.state2.absmax, state.offset.reshape(1)]
        flat = torch.zeros(self.num_stored, dtype=self.storage, device=weight.device)
        for part, value in zip(self._parts(flat), values, strict=True):
            content = value.flatten().view(torch.uint8)
            part[: len(content)] = content
        return flat

    def unpack(self, flat: torch.Tensor, after: torch.Tensor | None = None) -> torch.Tensor:
        """Return the matrix, as near as 4 bits come.

        Args:
            flat: the flat form.
            after: what a compiled one waits for; see `ftkit.train.model.nf4_compiled.dequantise`.
        """
        flat = flat.detach()
        if torch.compiler.is_compiling():
            tables = _tables(flat.device)
            weights = dequantise(self._parts(flat), tables, self.storage, after)[: self.num_weights]
        else:
            weights = self._unpack_uncompiled(flat)
        return weights.view(self.num_outputs, self.num_inputs)

    def _unpack_uncompiled(self, flat: torch.Tensor) -> torch.Tensor:
        _bitsandbytes()  # defines the operators; its own function around them takes the host longer than they do
        operators = torch.ops.bitsandbytes
        if flat.storage_offset() % _ALIGNMENT:  # an engine may gather it amid others
            flat = flat.clone()
        packed, scales, nested, mean = self._parts(flat)
        blocks = -(-self.num_weights // NF4_BLOCK)
        scales_of_scales = nested.view(torch.float32)[: -(-blocks // NF4_NESTED_BLOCK)]
        exact_scales = operators.dequantize_blockwise(
            scales[:blocks], scales_of_scales, _code(flat.device), NF4_NESTED_BLOCK, torch.float32
        )
        exact_scales += mean.view(torch.float32)[0]
        bytes_of_weights = packed[: -(-self.num_weights // 2)].unsqueeze(1)
        # Not by rows: on processors the operator takes other rows' scales where a row ends within a block.
        weights: torch.Tensor = operators.dequantize_4bit(
            bytes_of_weights, exact_scales, NF4_BLOCK, "nf4", (self.num_weights,), self.storage
        )
        return weights

    def _parts(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the parts of a flat form, as bytes."""
        return torch.split(flat.view(torch.uint8), list(nf4_parts(self.num_weights)))


class Nf4Linear(nn.Linear):
    """A frozen linear layer, its matrix in 4 bits. It is a `nn.Linear` in name, so that peft adapts it as one."""

    def __init__(self, layout: Nf4Layout, bias: nn.Parameter | None, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layout.num_inputs, layout.num_outputs
        self.layout = layout
        self.register_parameter("bias", bias)
        empty = torch.empty(layout.num_stored, dtype=layout.storage, device=device)
        self.packed = nn.Parameter(empty, requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override] # computed, where a Linear holds a parameter
        """The matrix, dequantised: what DoRA takes the lengths of."""
        return self.layout.unpack(self.packed)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Multiply by the matrix, which exists only as long as that takes."""
        product: Any = _CompiledProduct.apply if torch.compiler.is_compiling() else _product
        output: torch.Tensor = product(input, self.packed, self.out_features)
        return output if self.bias is None else output + self.bias

    def extra_repr(self) -> str:
        """Describe the layer as torch prints modules."""
        return f"in_features={self.in_features}, out_features={self.out_features}, NF4"


# An operator, so that activation checkpointing knows it by name. Autograd keeps the parameter, not views of it: an
# engine may free and gather it in between.
@torch.library.custom_op("ftkit::nf4_product", mutates_args=())
def _product(inputs: torch.Tensor, packed: torch.Tensor, num_outputs: int) -> torch.Tensor:
    return functional.linear(inputs, Nf4Layout(num_outputs, inputs.shape[-1], packed.dtype).unpack(packed))


@torch.library.custom_op("ftkit::nf4_product_backward", mutates_args=())
def _product_backward(gradient: torch.Tensor, packed: torch.Tensor, num_inputs: int) -> torch.Tensor:
    return gradient @ Nf4Layout(gradient.shape[-1], num_inputs, packed.dtype).unpack(packed)


@_product.register_fake
@_product_backward.register_fake
def _empty_product(factor: torch.Tensor, _: torch.Tensor, width: int) -> torch.Tensor:
    return factor.new_empty(*factor.shape[:-1], width)


def _keep_packed(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, int], output: torch.Tensor) -> None:
    del output
    ctx.save_for_backward(inputs[1])
    ctx.num_inputs = inputs[0].shape[-1]


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return _product_backward(gradient, *ctx.saved_tensors, ctx.num_inputs), None, None


_product.register_autograd(_gradients, setup_context=_keep_packed)


class _CompiledProduct(torch.autograd.Function):
    """The same product for a compiler, which sees into it. It is written to dequantise twice, as `after` makes sure."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, packed: torch.Tensor, num_outputs: int) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.num_inputs = inputs.shape[-1]
        layout = Nf4Layout(num_outputs, inputs.shape[-1], packed.dtype)
        return functional.linear(inputs, layout.unpack(packed, after=inputs))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        layout = Nf4Layout(gradient.shape[-1], ctx.num_inputs, packed.dtype)
        return gradient @ layout.unpack(packed, after=gradient), None, None


def quantise_linears(layers: Iterable[nn.Module], storage: torch.dtype) -> None:
    """Put every linear layer within decoder layers into 4 bits; those without memory stay without."""
    for layer in layers:
        for name, linear in list(layer.named_modules()):
            if type(linear) is nn.Linear:
                layer.set_submodule(name, _quantised(linear, storage))


def _quantised(linear: nn.Linear, storage: torch.dtype) -> Nf4Linear:
    layout = Nf4Layout(linear.out_features, linear.in_features, storage)
    quantised = Nf4Linear(layout, linear.bias, linear.weight.device)
    if not linear.weight.is_meta:
        quantised.packed.data.copy_(layout.pack(linear.weight.data))
    return quantised


@cache
def import_bitsandbytes(needed_by: str) -> Any:
    """Return bitsandbytes' functions.

    Raises:
        PrerequisiteError: it is not installed.
    """
    try:
        from bitsandbytes import functional as library  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise PrerequisiteError(
            f"{needed_by} needs bitsandbytes, which is not installed", fix="pip install 'ftkit[qlora]'"
        ) from error
    return library


def _bitsandbytes() -> Any:
    return import_bitsandbytes("method 'qlora'")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers that 4-bit weights stand for, and those that 8-bit scales do."""
    return _levels(device), _code(device)


@cache
def _levels(device: torch.device) -> torch.Tensor:
    levels: torch.Tensor = _bitsandbytes().get_4bit_type("nf4", device=device)
    return levels


@cache
def _code(device: torch.device) -> torch.Tensor:
    code: torch.Tensor = _bitsandbytes().create_dynamic_map().to(device)
    return code
