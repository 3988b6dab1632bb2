"""FP8 matmuls, emulated on CPUs: of frozen 8-bit weights, and of trained weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ftkit.runs.records import EvaluationRecord, VerificationRecord
from ftkit.train.model.float8 import Fp8Layout, convert_linears
from ftkit.train.model.linears import QuantizedLinear, quantize_linears

if TYPE_CHECKING:
    from collections.abc import Callable

E4M3_ROUNDING = 2**-4
"""Of e4m3, whose numbers have three bits after the leading one: half of the last one."""


def in_fp8(inputs: int, outputs: int) -> Fp8Layout:
    return Fp8Layout(outputs, inputs, torch.float32)


@given(seed=st.integers(0, 2**31), rows=st.integers(1, 5).map(lambda n: 16 * n), spread=st.floats(0, 20))
def test_each_row_of_a_matrix_is_quantized_with_its_own_scale(seed: int, rows: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, 32, generator=generator) * torch.logspace(-spread / 2, spread / 2, rows)[:, None]
    layout = Fp8Layout(rows, 32, torch.float32)
    flat = layout.quantize(weight)
    assert flat.numel() == layout.num_stored
    error = (layout.dequantize(flat) - weight).abs()
    largest = weight.abs().amax(dim=1, keepdim=True)
    assert bool((error <= E4M3_ROUNDING * weight.abs() + 2**-9 / 448 * largest).all())


def test_a_row_of_zeros_stays_zero() -> None:
    layout = Fp8Layout(16, 16, torch.bfloat16)
    assert not layout.dequantize(layout.quantize(torch.zeros(16, 16))).any()


def test_the_gradient_of_an_fp8_layer_matches_its_matrix_up_to_rounding() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128, bias=False))
    quantize_linears([model], in_fp8)
    (layer,) = model
    assert isinstance(layer, QuantizedLinear)
    inputs = torch.randn(5, 64, requires_grad=True)
    outputs = model(inputs)
    direction = torch.randn_like(outputs)
    (through_layer,) = torch.autograd.grad(outputs, inputs, direction)
    exact = nn.functional.linear(inputs, layer.weight)
    (through_matrix,) = torch.autograd.grad(exact, inputs, direction)
    for found, expected in ((outputs, exact), (through_layer, through_matrix)):
        assert float(((found - expected).norm() / expected.norm()).detach()) < E4M3_ROUNDING


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.class 'torch.autograd.function.Function'. should not:DeprecationWarning")
def test_a_compiled_fp8_layer_saves_only_its_8_bit_matrix_for_backward() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.SiLU(), nn.Linear(512, 256, bias=False))
    quantize_linears([model], in_fp8)
    inputs, kept = torch.randn(3, 256, requires_grad=True), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")(inputs)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    new = [tensor for tensor in kept if tensor.untyped_storage().data_ptr() not in parameters]
    assert sum(tensor.nbytes for tensor in new) < 256 * 512 / 2
    (gradient,) = torch.autograd.grad(outputs.square().sum(), inputs)
    (expected,) = torch.autograd.grad(model(inputs).square().sum(), inputs)
    torch.testing.assert_close(gradient, expected)
    torch._dynamo.reset()


def test_linears_except_routers_and_odd_sizes_are_trained_in_fp8() -> None:
    torch.manual_seed(1)
    layer = nn.ModuleDict({"up_proj": nn.Linear(32, 64), "gate": nn.Linear(32, 16), "odd": nn.Linear(32, 20)})
    names = [name for name, _ in layer.named_parameters()]
    inputs = torch.randn(7, 32)
    expected = layer["up_proj"](inputs)
    convert_linears([layer])
    assert {name: type(module) is nn.Linear for name, module in layer.items()} == {
        "up_proj": False, "gate": True, "odd": True
    }  # fmt: skip
    assert [name for name, _ in layer.named_parameters()] == names
    found = layer["up_proj"](inputs)
    assert 0 < float((found - expected).detach().norm() / expected.detach().norm()) < E4M3_ROUNDING


@given(st.integers(0, 2**31), st.sampled_from([1e-6, 1.0, 1e4]), st.booleans())
def test_gradients_of_a_trained_fp8_layer_are_products_of_rounded_factors(
    seed: int, spread: float, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(32, 48, bias=has_bias)
    inputs = torch.randn(3, 16, 32, generator=generator).requires_grad_()
    direction = torch.randn(3, 16, 48, generator=generator) * spread
    model = nn.Sequential(linear)
    convert_linears([model])
    model(inputs).backward(direction)
    rounded_direction = in_precision(direction, torch.float8_e5m2)
    of_inputs = rounded_direction @ in_precision(linear.weight, torch.float8_e4m3fn)
    of_weight = rounded_direction.flatten(0, 1).t() @ in_precision(inputs, torch.float8_e4m3fn).flatten(0, 1)
    for found, expected in ((inputs.grad, of_inputs), (linear.weight.grad, of_weight)):
        assert found is not None
        assert float((found - expected).norm()) <= 1e-6 * float(expected.norm())
    if linear.bias is not None:
        torch.testing.assert_close(linear.bias.grad, direction.sum((0, 1)))


def in_precision(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of a tensor as FP8 with one scale holds them."""
    scale = tensor.detach().abs().max() / torch.finfo(dtype).max
    return (tensor.detach() / scale).to(dtype).float() * scale


def test_a_layer_that_gets_no_gradient_and_no_input_stays_finite_in_fp8() -> None:
    model = nn.Sequential(nn.Linear(32, 16, bias=False))
    convert_linears([model])
    outputs = model(torch.zeros(16, 32))
    outputs.backward(torch.zeros_like(outputs))
    (weight,) = model.parameters()
    assert not outputs.any()
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize(
    "settings",
    [
        ("training.precision=fp8",),
        (
            "training.method=lora",
            "training.base_precision=fp8",
            "training.precision=bf16",
            "training.learning_rate=0.02",
        ),
    ],
    ids=["full", "lora"],
)
def test_a_run_in_fp8_learns_and_passes_its_checks(
    settings: tuple[str, ...], finished_run: Any, make_run: Callable[..., Any]
) -> None:
    weights = f"model.weights={finished_run.layout.export}" if len(settings) > 1 else "model.weights=random"
    run = make_run(f"fp8-{len(settings)}", weights, *settings, "evaluation.generation=null")
    run.train()
    before, after = run.records(EvaluationRecord)
    assert after.loss < before.loss - 0.05
    assert run.records(VerificationRecord)
