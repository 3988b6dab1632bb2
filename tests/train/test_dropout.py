"""Dropout of adapters: masks by hashes of keys, not saved; and the forward of adapters, as peft computes it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from ftkit.data.packing import IGNORED
from ftkit.models.adapters import LoraSpec
from ftkit.planning.plan import BatchPlan
from ftkit.train import gpu_kernels
from ftkit.train.components.batches import BatchSchedule
from ftkit.train.model.adapted_linear import AdaptedLinear, Draw, Dropout, TokenKeys, token_keys

ROWS, WIDTH = 512, 1024

pytestmark = [  # warnings that torch.compile raises in torch 2.13
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.class 'torch.autograd.function.Function'. should not:DeprecationWarning"),
]


def dropout_of(probability: float, tokens: range, name: str = "q_proj", seed: int = 0) -> Dropout:
    """Return dropout of an adapter for tokens by their numbers in the order of the data."""
    keys = TokenKeys(probability, seed)
    keys.keys = torch.from_numpy(token_keys(np.array(tokens)))
    dropout = keys.dropout_of(name)
    assert dropout is not None
    return dropout


def kept(probability: float, first: int, name: str = "q_proj", seed: int = 0) -> torch.Tensor:
    """Return where elements of ROWS tokens are kept, fp32 [ROWS, WIDTH]."""
    ones = torch.ones(ROWS, WIDTH)
    return dropout_of(probability, range(first, first + ROWS), name, seed).draw(ones).drop(ones).sign()


def correlation(one: torch.Tensor, other: torch.Tensor, probability: float) -> float:
    """Return the correlation of two masks in standard errors."""
    products = (one - 1 + probability) * (other - 1 + probability)
    return float(products.mean() / (probability * (1 - probability)) * products.numel() ** 0.5)


@pytest.mark.parametrize("probability", [0.05, 0.5])
def test_masks_are_independent_of_each_other_and_their_elements_too(probability: float) -> None:
    """Of one adapter and others, of the next tokens, of those after 2^32 others, and with another seed."""
    drawn = [(0, "q_proj", 0), (0, "k_proj", 0), (ROWS, "q_proj", 0), (2**32, "q_proj", 0), (0, "q_proj", 1)]
    masks = [kept(probability, *each) for each in drawn]
    error = (probability * (1 - probability) / (ROWS * WIDTH)) ** 0.5
    for mask in masks:
        assert abs(float(mask.mean()) - 1 + probability) < 5 * error
        for distance in (1, 2, 3, 32, 64, 128, 256):
            assert abs(correlation(mask[:, distance:], mask[:, :-distance], probability)) < 5
            assert abs(correlation(mask[distance:], mask[:-distance], probability)) < 5
    assert all(abs(correlation(masks[0], mask, probability)) < 5 for mask in masks[1:])


def test_a_tokens_mask_does_not_depend_on_the_other_tokens_of_its_micro_batch() -> None:
    inputs = torch.randn(4, 6, 8)
    numbers = torch.randperm(24).view(4, 6)
    keys = TokenKeys(0.4)
    dropout = keys.dropout_of("q_proj")
    assert dropout is not None

    def drop(rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        keys.keys = torch.from_numpy(token_keys(numbers.numpy()))
        return dropout.draw(rows).drop(rows)

    whole = drop(inputs, numbers)
    for chosen in ((slice(1, 3),), (slice(None), slice(2, 5)), (slice(3, None), slice(5, None))):
        assert torch.equal(drop(inputs[chosen], numbers[chosen]), whole[chosen])


class Packs:
    """Five packs of two documents and padding; each token is its place among those of all packs."""

    sequence_length = 16
    num_targets = np.full(5, 11)
    shares_prompts = False

    def __len__(self) -> int:
        return 5

    def document_lengths(self, packs: list[int]) -> Any:
        return np.tile([7, 4], len(packs))

    def document_starts(self, packs: list[int]) -> Any:
        return np.zeros(2 * len(packs), np.int64)

    def read(self, packs: list[int]) -> Any:
        place = np.arange(16)
        labels = np.where(place < 11, place + 1, IGNORED)
        tokens = np.where(place < 11, 16 * np.array(packs)[:, None] + place, 999)
        positions = np.concatenate([np.arange(7), np.arange(4), np.arange(5)])
        rows = [np.broadcast_to(each, tokens.shape) for each in (tokens, labels, positions, 0)]
        return np.stack(rows, axis=1).astype(np.int32)


def keys_of_step(step: int, size: int, micro: int, *, is_packed: bool = True) -> dict[int, int]:
    """Return the key of each token of a step's documents, over all ranks; a step has four packs."""
    plan = BatchPlan(micro, 4 // (size * micro), 4)
    found: dict[int, int] = {}
    for rank in range(size):
        schedule = BatchSchedule(
            store=Packs(),  # type: ignore[arg-type]
            plan=plan,
            seed=1,
            num_packs_in_run=10,
            rank=rank,
            size=size,
            is_packed=is_packed,
        )
        for batch in schedule.step(step).micro_batches:
            assert batch.token_keys is not None
            keys, tokens = batch.token_keys.flatten()[batch.label_index], batch.input_ids.flatten()[batch.label_index]
            found |= dict(zip(tokens.tolist(), keys.tolist(), strict=True))
    return found


def test_keys_of_tokens_are_the_same_on_any_number_of_processes_and_others_in_each_epoch() -> None:
    steps = [keys_of_step(step, 1, 4) for step in range(3)]
    for step, expected in enumerate(steps):
        assert len(expected) == 11 * (4 if step < 2 else 2)  # the last step has two packs
        assert keys_of_step(step, 1, 1) == keys_of_step(step, 2, 1) == keys_of_step(step, 4, 1) == expected
        for size in (1, 2, 4):
            assert keys_of_step(step, size, 1, is_packed=False) == expected
    every = [key for keys in steps for key in keys.values()]
    assert len(set(every)) == len(every) == 2 * 5 * 11


def test_keys_of_tokens_are_those_of_splitmix64() -> None:
    """Its published first outputs for the seed 1234567; the generator adds a constant to its state before each."""
    states = (1234567 + (np.arange(1, 4).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))).view(np.int64)
    found = token_keys(states).view(np.uint64).tolist()
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_ranks_with_parts_of_the_features_have_their_parts_of_the_mask() -> None:
    inputs = torch.randn(2, 5, 12)
    dropout = dropout_of(0.4, range(10))
    divided = [dropout.draw(part, rank).drop(part) for rank, part in enumerate(inputs.split(4, dim=-1))]
    assert torch.equal(torch.cat(divided, dim=-1), dropout.draw(inputs).drop(inputs))


def is_kept(feature: int, key: int, probability: float) -> bool:
    """Return whether an element is kept, by `triple32` in Python's integers."""
    number = (feature ^ key) % 2**32
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        number = ((number ^ number >> shift) * factor + (key >> 32)) % 2**32
    return (number + 2**31) % 2**32 >= round(probability * 2**32)


@pytest.mark.parametrize("first", [0, 18, 2**31 - 4, 2**33 - 4])
def test_masks_are_hashes_of_features_and_keys_modulo_2_to_the_32(first: int) -> None:
    rows, key, probability = torch.randint(-(2**63), 2**63 - 1, (40,)), torch.tensor(-(2**62) - 7), 0.4
    expected = [[is_kept(first + each, row ^ int(key), probability) for each in range(9)] for row in rows.tolist()]
    assert gpu_kernels.drop(torch.ones(40, 9), rows, key, probability, first).sign().tolist() == expected


def test_graphs_have_no_positions_in_32_bits() -> None:
    """Inductor may compute these in 64 bits: integers in 32 bits depend on the keys."""
    graph = make_fx(lambda inputs, rows, key: gpu_kernels.drop(inputs, rows, key, 0.1, 3))(
        torch.ones(4, 5), torch.arange(4), torch.tensor(7)
    ).graph
    _, rows, _ = graph.find_nodes(op="placeholder")
    keyed, narrow = {rows}, []
    for node in graph.nodes:
        if keyed.intersection(node.all_input_nodes):
            keyed.add(node)
        if "val" in node.meta and node.meta["val"].dtype == torch.int32:
            narrow.append(node)
    assert narrow
    assert keyed.issuperset(narrow)


def saved_by(product: Any) -> list[torch.Size]:
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each.shape) or each, lambda each: each):
        product().square().sum().backward()
    return saved


def test_a_product_has_the_gradients_of_its_dropped_inputs_and_saves_only_these_inputs_and_keys() -> None:
    inputs, weight = torch.randn(2, 6, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    draw = dropout_of(0.3, range(12)).draw(inputs)
    mask = draw.drop(torch.ones_like(inputs)).detach()
    expected = torch.autograd.grad(linear(inputs * mask, weight).square().sum(), (inputs, weight))
    saved = saved_by(lambda: draw.multiply(inputs, weight))
    torch.testing.assert_close((inputs.grad, weight.grad), expected)
    assert sorted(saved) == sorted(
        [inputs.shape, weight.shape, torch.Size([12]), torch.Size([]), torch.Size([2, 6, 3])]
    )


def test_compiled_layers_draw_the_same_masks_and_save_none() -> None:
    weights = [torch.randn(4, 64, requires_grad=True) for _ in range(3)]
    dropouts = [dropout_of(0.1, range(32), name) for name in "qkv"]

    def multiply(inputs: torch.Tensor) -> torch.Tensor:
        normed = inputs * inputs.square().mean(-1, keepdim=True).rsqrt()
        return sum(  # type: ignore[return-value]
            dropout.draw(normed).multiply(normed, weight).square()
            for dropout, weight in zip(dropouts, weights, strict=True)
        )

    inputs = torch.randn(32, 64, requires_grad=True)
    saved_by(lambda: multiply(inputs))
    expected = [each.grad for each in (inputs, *weights)]
    inputs.grad, *_ = (setattr(each, "grad", None) for each in (inputs, *weights))
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
        nn.init.normal_(parameter, std=0.2)  # gradients of about 1, whose rounding is far below the tolerance
    layer.lora_dropout["default"] = mask = Mask()
    base.requires_grad_(False)
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    inputs = torch.randn(3, 24, requires_grad=True)
    dropout = dropout_of(0.3, range(3))
    mask.draw = dropout.draw(inputs)
    adapted = AdaptedLinear(layer, spec, torch.ones(()), dropout)
    for is_training in (True, False):
        results = []
        for module in (adapted, layer.train(is_training)):
            output = module.train(is_training)(inputs)
            results.append((output, *torch.autograd.grad(output.square().sum(), [inputs, *trained])))
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


def test_outputs_with_dora_may_be_changed_in_place_and_are_the_same_compiled() -> None:
    spec = LoraSpec(rank=4, alpha=6, use_dora=True)
    base = nn.Linear(24, 16, bias=False)
    layer = Linear(base, "default", LoraConfig(r=4, lora_alpha=6, use_dora=True), 4, 6, use_dora=True)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    base.requires_grad_(False)
    adapted = AdaptedLinear(layer, spec, torch.ones(()))
    inputs = torch.randn(3, 24, requires_grad=True)

    def clip(module: nn.Module) -> torch.Tensor:
        output: torch.Tensor = module(inputs)
        return output.clamp_(-0.5, 0.5)  # as OLMo clips queries

    compiled = torch.compile(partial(clip, adapted), fullgraph=True, backend="aot_eager")
    results = []
    for call in (partial(clip, layer), partial(clip, adapted), compiled):
        output = call()
        wanted = [inputs, *(each for each in layer.parameters() if each.requires_grad)]
        results.append((output, *torch.autograd.grad(output.square().sum(), wanted)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[2], results[0], rtol=1e-4, atol=1e-4)


class Mask(nn.Module):
    """One draw in the place of peft's dropout."""

    draw: Draw

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.draw.drop(inputs) if self.training else inputs
