"""Captured decoders train as those whose kernels the host launches one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from gpu_models import IDS, LENGTH, VOCABULARY, architecture, training

from ftkit.data.packing import IGNORED
from ftkit.planning.choices import EnginePlan
from ftkit.train.components.batches import to_micro_batch
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.model.attention import choose_kernel, register_kernel
from ftkit.train.model.hf_model import build_empty, find_decoder_layers, make_config
from ftkit.train.model.lora import init_adapters, prepare_method
from ftkit.train.model.pretrained import init_weights

if TYPE_CHECKING:
    from ftkit.train.causal_lm import MicroBatch
    from ftkit.train.world import World

pytestmark = pytest.mark.gpu
NUM_STEPS = 6


def batch_of(world: World, number: int) -> MicroBatch:
    """Two packs whose numbers of documents and labels differ from those of other numbers."""
    random = np.random.default_rng(number)
    packs = np.zeros((2, 4, LENGTH), dtype=np.int32)
    packs[:, 0] = random.integers(0, VOCABULARY, (2, LENGTH))
    packs[:, 1] = np.where(random.random((2, LENGTH)) < 0.5, packs[:, 0], IGNORED)
    for pack in packs:
        begins = np.unique([0, *random.integers(1, LENGTH, 1 + 40 * (number % 3))])
        starts = np.zeros(LENGTH, dtype=np.int32)
        starts[begins] = begins
        pack[2] = np.arange(LENGTH) - np.maximum.accumulate(starts)
    return to_micro_batch(packs, world.device)


def engine_of(world: World, family: str, *, is_captured: bool, **changes: Any) -> Fsdp2Engine:
    torch.manual_seed(0)
    settings = training(**changes)
    shape = architecture(family, tie_word_embeddings=family != "qwen3")
    config = make_config(shape, IDS)
    kernel, _ = choose_kernel(settings, config, world)
    model = build_empty(config, register_kernel(kernel))
    prepare_method(model, settings, world.device)

    def initialize(sharded: torch.nn.Module) -> None:
        init_weights(sharded, shape, 0)
        if settings.adapters is not None:
            init_adapters(sharded, 0)

    return Fsdp2Engine(model, settings, world, initialize, EnginePlan("fsdp2", "", replays_graphs=is_captured))


def train(engine: Fsdp2Engine, world: World, num_micro_batches: int) -> list[tuple[float, float]]:
    """Return the loss and the norm of the gradient of each step; evaluate after one of them."""
    results = []
    for step in range(NUM_STEPS):
        batches = [batch_of(world, num_micro_batches * step + each) for each in range(num_micro_batches)]
        num_labels = sum(len(each.labels) for each in batches)
        total = torch.zeros((), device=world.device)
        for each in batches:
            loss = engine.forward(each)
            engine.backward(loss, num_labels, is_last=each is batches[-1])
            total += loss.detach() / num_labels
            del loss  # frees its graph, as the loop does
        results.append((float(total), float(engine.step(1e-3, 1.0))))
        if step == NUM_STEPS - 3:
            with engine.inference() as model:
                model(batch=batches[0])
    return results


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("gemma3_text", {"optimizer": "adamw8bit"}),
        ("qwen3", {"activation_checkpointing": "selective"}),
        ("llama", {"method": "lora", "lora": {"dropout": 0.1}}),
        ("llama", {"method": "qlora"}),
        ("llama", {"method": "lora", "base_precision": "fp8"}),
        ("llama", {"attention": "flex"}),
        ("llama", {"attention": "sdpa", "precision": "fp32"}),
        ("llama", {"precision": "fp8"}),
    ],
)
def test_a_captured_decoder_has_the_losses_and_gradients_of_launched_kernels(
    family: str, changes: dict[str, Any], num_micro_batches: int, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = []
    for is_captured in (False, True):
        engine = engine_of(world, family, is_captured=is_captured, **changes)
        found.append(train(engine, world, num_micro_batches))
        has_graphs = engine._graphs is not None and engine._graphs._captured is not None
        assert has_graphs == is_captured, [each.message for each in caplog.records]
    launched, captured = found
    assert np.array(captured) == pytest.approx(np.array(launched), rel=1e-2)


def test_a_decoder_that_waits_for_the_device_trains_without_graphs(world: World) -> None:
    found = []
    for is_captured in (False, True):
        engine = engine_of(world, "llama", is_captured=is_captured)
        layer = find_decoder_layers(engine.model.hf_model)[1]
        layer.register_forward_pre_hook(lambda _, inputs: float(inputs[0].float().sum()) * 0 or None)
        found.append(train(engine, world, 1))
        assert engine._graphs is None or engine._graphs._captured is None
    launched, captured = found
    assert np.array(captured) == pytest.approx(np.array(launched), rel=2e-3)
