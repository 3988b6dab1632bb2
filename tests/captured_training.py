"""Training on micro-batches that differ, with and without a captured decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpu_models import IDS, LENGTH, VOCABULARY, architecture, training

from ftkit.data.packing import IGNORED
from ftkit.planning.choices import EnginePlan
from ftkit.train.components.batches import to_micro_batch
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.model.attention import choose_kernel, register_kernel
from ftkit.train.model.hf_model import build_empty, make_config
from ftkit.train.model.lora import init_adapters, prepare_method
from ftkit.train.model.pretrained import init_weights

if TYPE_CHECKING:
    from ftkit.train.causal_lm import MicroBatch
    from ftkit.train.world import World

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
