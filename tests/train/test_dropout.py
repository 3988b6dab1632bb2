"""Dropout of adapters: masks by hashes, saved as seeds; and the forward of adapters, as peft computes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from ftkit.config.adapters import LoraSpec
from ftkit.train import gpu_kernels
from ftkit.train.model.adapted_linear import AdaptedLinear
from ftkit.train.model.dropout import Dropout

ROWS, WIDTH = 512, 1024

pytestmark = [  # warnings that torch.compile raises in torch 2.13
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.class 'torch.autograd.function.Function'. should not:DeprecationWarning"),
]


def kept(dropout: Dropout) -> torch.Tensor:
    """Return where elements are kept, fp32 [ROWS, WIDTH]."""
    return dropout.drop(torch.ones(ROWS, WIDTH)).sign()


def correlation(one: torch.Tensor, other: torch.Tensor, probability: float) -> float:
    """Return the correlation of two masks in standard errors."""
    products = (one - 1 + probability) * (other - 1 + probability)
    return float(products.mean() / (probability * (1 - probability)) * products.numel() ** 0.5)


@pytest.mark.parametrize("probability", [0.05, 0.5])
def test_masks_are_independent_of_each_other_and_their_elements_too(probability: float) -> None:
    torch.manual_seed(0)
    masks = [kept(Dropout.draw(probability, torch.empty(ROWS, WIDTH))) for _ in range(4)]
    error = (probability * (1 - probability) / (ROWS * WIDTH)) ** 0.5
    for mask in masks:
        assert abs(float(mask.mean()) - 1 + probability) < 5 * error
        for distance in (1, 2, 3, 32, 64, 128, 256):
            assert abs(correlation(mask[:, distance:], mask[:, :-distance], probability)) < 5
            assert abs(correlation(mask[distance:], mask[:-distance], probability)) < 5
    assert all(abs(correlation(masks[0], mask, probability)) < 5 for mask in masks[1:])


def test_ranks_with_parts_of_the_features_have_their_parts_of_the_mask() -> None:
    inputs = torch.randn(2, 5, 12)
    whole, *parts = (
        torch.random.manual_seed(3) and Dropout.draw(0.4, inputs[..., :width], rank, 12 // width)
        for width, rank in ((12, 0), (4, 0), (4, 1), (4, 2))
    )
    divided = [part.drop(each) for part, each in zip(parts, inputs.split(4, dim=-1), strict=True)]
    assert torch.equal(torch.cat(divided, dim=-1), whole.drop(inputs))


def is_kept(position: int, keys: list[int], probability: float) -> bool:
    """Return whether an element is kept, by `triple32` in Python's integers."""
    number = (position ^ keys[0]) % 2**32
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        number = ((number ^ number >> shift) * factor + keys[1]) % 2**32
    return (number + 2**31) % 2**32 >= round(probability * 2**32)


@pytest.mark.parametrize("features", [(0, 9), (18, 36), (2**31 - 4, 2**30 + 5), (2**33 - 4, 2**40 + 5)])
def test_masks_are_hashes_of_positions_modulo_2_to_the_32(features: tuple[int, int]) -> None:
    first, total = features
    seed, probability = torch.tensor([0.3, 0.8]), 0.4
    keys = [int(each * 2**24) * 0xED5AD4BB for each in seed]
    expected = [[is_kept(row * total + first + each, keys, probability) for each in range(9)] for row in range(40)]
    assert gpu_kernels.drop(torch.ones(40, 9), seed, probability, features).sign().tolist() == expected


def test_graphs_have_no_positions_in_32_bits() -> None:
    """Inductor may compute these in 64 bits: integers in 32 bits depend on the seed."""
    graph = make_fx(lambda inputs, seed: gpu_kernels.drop(inputs, seed, 0.1, (3, 20)))(
        torch.ones(4, 5), torch.rand(2)
    ).graph
    _, seed = graph.find_nodes(op="placeholder")
    seeded, narrow = {seed}, []
    for node in graph.nodes:
        if seeded.intersection(node.all_input_nodes):
            seeded.add(node)
        if "val" in node.meta and node.meta["val"].dtype == torch.int32:
            narrow.append(node)
    assert narrow
    assert seeded.issuperset(narrow)


def saved_by(product: Any) -> list[torch.Size]:
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each.shape) or each, lambda each: each):
        product().square().sum().backward()
    return saved


def test_a_product_has_the_gradients_of_its_dropped_inputs_and_saves_only_these_inputs_and_the_seed() -> None:
    inputs, weight = torch.randn(2, 6, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    dropout = Dropout.draw(0.3, inputs)
    mask = dropout.drop(torch.ones_like(inputs)).detach()
    expected = torch.autograd.grad(linear(inputs * mask, weight).square().sum(), (inputs, weight))
    saved = saved_by(lambda: dropout.multiply(inputs, weight))
    torch.testing.assert_close((inputs.grad, weight.grad), expected)
    assert sorted(saved) == sorted([inputs.shape, weight.shape, torch.Size([2]), torch.Size([2, 6, 3])])


def test_compiled_layers_save_seeds_instead_of_masks() -> None:
    weights = [torch.randn(4, 64, requires_grad=True) for _ in range(3)]

    def multiply(inputs: torch.Tensor) -> torch.Tensor:
        normed = inputs * inputs.square().mean(-1, keepdim=True).rsqrt()
        return sum(Dropout.draw(0.1, normed).multiply(normed, weight).square() for weight in weights)  # type: ignore[return-value]

    inputs = torch.randn(32, 64, requires_grad=True)
    torch.manual_seed(2)
    saved_by(lambda: multiply(inputs))
    expected = [each.grad for each in (inputs, *weights)]
    inputs.grad, *_ = (setattr(each, "grad", None) for each in (inputs, *weights))
    torch.manual_seed(2)
    compiled = torch.compile(multiply, fullgraph=True, backend="aot_eager_decomp_partition")
    saved = saved_by(lambda: compiled(inputs))
    torch.testing.assert_close([each.grad for each in (inputs, *weights)], expected)
    assert sum(shape.numel() for shape in saved if shape.numel() >= inputs.numel()) <= 2 * inputs.numel()


@pytest.mark.parametrize("base", [nn.Linear(24, 16, bias=True), nn.Linear(24, 16, bias=False), Conv1D(16, 24)])
@pytest.mark.parametrize("use_dora", [False, True])
def test_outputs_and_gradients_are_those_of_peft(base: nn.Module, *, use_dora: bool) -> None:
    spec = LoraSpec(rank=4, alpha=6, use_rslora=True, use_dora=use_dora, dropout=0.3)
    is_transposed = isinstance(base, Conv1D)
    options = {"use_rslora": True, "use_dora": use_dora, "fan_in_fan_out": is_transposed}
    config = LoraConfig(r=4, lora_alpha=6, lora_dropout=0.3, **options)
    layer = Linear(base, "default", config, 4, 6, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    layer.lora_dropout["default"] = mask = Mask()
    base.requires_grad_(False)
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    inputs = torch.randn(3, 24, requires_grad=True)
    adapted = AdaptedLinear(layer, spec)
    for is_training in (True, False):
        results = []
        for module in (adapted, layer.train(is_training)):
            torch.manual_seed(5)
            mask.dropout = Dropout.draw(0.3, inputs)
            torch.manual_seed(5)
            output = module.train(is_training)(inputs)
            results.append((output, *torch.autograd.grad(output.square().sum(), [inputs, *trained])))
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


class Mask(nn.Module):
    """One draw in the place of peft's dropout."""

    dropout: Dropout

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.dropout.drop(inputs) if self.training else inputs
