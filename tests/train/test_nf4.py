"""4-bit weights: dequantized as by bitsandbytes, compiled or not, and not saved for backward."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo
from bitsandbytes import functional as bitsandbytes
from compiler_warnings import COMPILER_WARNINGS
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from ftkit.train.memory.compile import compile_with_joint_adapters
from ftkit.train.model.linears import Nf4Layout, QuantizedLinear, quantize_linears

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPILERS = (
    "aot_eager_decomp_partition",
    pytest.param("inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")),
)
"""Backends: one partitions forward and backward like the other, but generates no code."""

pytestmark = [*COMPILER_WARNINGS]


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def in_nf4(inputs: int, outputs: int) -> Nf4Layout:
    return Nf4Layout(outputs, inputs, torch.float32)


def two_layers() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.SiLU(), nn.Linear(512, 256, bias=False))
    quantize_linears([model], in_nf4)
    return model


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(64, 128), (300, 257), (7, 13)])
def test_a_flat_nf4_matrix_equals_that_of_bitsandbytes(
    size: tuple[int, int], storage: torch.dtype, compiler: str
) -> None:
    weight = torch.randn(size, generator=torch.Generator().manual_seed(1))
    packed, state = bitsandbytes.quantize_4bit(weight.to(storage), compress_statistics=True, quant_type="nf4")
    layout = Nf4Layout(*size, storage)
    expected = bitsandbytes.dequantize_4bit(packed, state)
    flat = layout.quantize(weight)
    assert torch.equal(layout.dequantize(flat), expected)
    empty = layout.dequantize(flat.to("meta"))
    assert (empty.shape, empty.dtype) == (expected.shape, expected.dtype)
    compiled = torch.compile(layout.dequantize, dynamic=False, fullgraph=True, backend=compiler)
    assert torch.equal(compiled(flat), expected)
    amid_others = torch.cat([flat[:3], flat])[3:]
    assert torch.equal(layout.dequantize(amid_others), expected)


def test_blocks_spanning_several_rows_are_dequantized_with_their_own_scales() -> None:
    flat = Nf4Layout(32, 64, torch.float32).quantize(torch.randn(32, 64))
    in_half_blocks = Nf4Layout(64, 32, torch.float32).dequantize(flat)
    assert torch.equal(in_half_blocks.flatten(), Nf4Layout(32, 64, torch.float32).dequantize(flat).flatten())


def test_the_gradient_of_a_4_bit_layer_matches_its_matrix() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 64, bias=False))
    quantize_linears([model], in_nf4)
    (layer,) = model
    assert isinstance(layer, QuantizedLinear)
    inputs = torch.randn(3, 32, requires_grad=True)
    model(inputs).square().sum().backward()
    through_layer, inputs.grad = inputs.grad, None
    torch.nn.functional.linear(inputs, layer.weight).square().sum().backward()
    assert torch.equal(through_layer, inputs.grad)
    assert layer.quantized.grad is None


@pytest.mark.oldest
@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_compiled_model_saves_no_dequantized_matrix_for_backward(compiler: str) -> None:
    model, inputs, kept = two_layers(), torch.randn(3, 256, requires_grad=True), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = torch.compile(model, fullgraph=True, backend=compiler)(inputs)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    new = [tensor for tensor in kept if tensor.untyped_storage().data_ptr() not in parameters]
    assert 0 < sum(tensor.nbytes for tensor in new) < 256 * 512 / 4
    outputs.square().sum().backward()
    compiled_gradient, inputs.grad = inputs.grad, None
    model(inputs).square().sum().backward()
    torch.testing.assert_close(compiled_gradient, inputs.grad)


class _Gated(nn.Module):
    """Two 4-bit layers with one input, which a norm computes: a compiler could dequantize both in one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(256, 4096, bias=False, dtype=torch.bfloat16) for _ in range(2))
        quantize_linears([self], lambda inputs, outputs: Nf4Layout(outputs, inputs, torch.bfloat16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = functional.rms_norm(inputs, inputs.shape[-1:])
        gated: torch.Tensor = functional.silu(self.gate(hidden)) * self.up(hidden)
        return gated


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_compiled_layers_dequantize_one_matrix_at_a_time() -> None:
    model = _Gated()
    compiled = torch.compile(model, fullgraph=True, backend=compile_with_joint_adapters)
    inputs = torch.randn(3, 256, requires_grad=True, dtype=torch.bfloat16)
    compiled(inputs).sum().backward()
    live = peak = 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        compiled(inputs).sum().backward()
    events: Any = profiler.profiler
    for event in events.kineto_results.events():
        live += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, live)
    matrix = 2 * 256 * 4096
    assert matrix < peak < 1.5 * matrix
