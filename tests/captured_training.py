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


def batch_of(world: World, number: int, num_packs: int = 2, length: int = LENGTH) -> MicroBatch:
    """Packs whose numbers of documents and labels differ from those of other numbers."""
    random = np.random.default_rng(number)
    packs = np.zeros((num_packs, 4, length), dtype=np.int32)
    packs[:, 0] = random.integers(0, VOCABULARY, (num_packs, length))
    packs[:, 1] = np.where(random.random((num_packs, length)) < 0.5, packs[:, 0], IGNORED)
    for pack in packs:
        begins = np.unique([0, *random.integers(1, length, 1 + 40 * (number % 3))])
        starts = np.zeros(length, dtype=np.int32)
        starts[begins] = begins
        pack[2] = np.arange(length) - np.maximum.accumulate(starts)
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


def train(engine: Fsdp2Engine, world: World, num_micro_batches: int, length: int = LENGTH) -> list[tuple[float, ...]]:
    """Return each step's loss, norm of the gradient, and sum of load-balancing losses; evaluate after one of them."""
    results = []
    for step in range(NUM_STEPS):
        numbers = range(num_micro_batches * step, num_micro_batches * (step + 1))
        batches = [batch_of(world, number, length=length) for number in numbers]
        num_labels = sum(len(each.labels) for each in batches)
        total = torch.zeros((), device=world.device)
        for each in batches:
            loss = engine.forward(each)
            engine.backward(loss, num_labels, is_last=each is batches[-1])
            total += loss.detach() / num_labels
            del loss  # frees its graph, as the loop does
        norm, balance = engine.step(1e-3, 1.0), engine.model.routers.take().values[-1:]
        results.append((float(total), float(norm), float(balance.sum())))
        if step == NUM_STEPS - 3:
            with engine.inference() as model:
                model(batch=batch_of(world, 0, num_packs=1, length=length))
    return results
