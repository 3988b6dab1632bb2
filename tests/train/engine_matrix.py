"""Every family, method and engine on two processes, started by torchrun: prints what each trained.

One start for all of them, since starting takes longer than a few steps of a tiny model.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

import torch
from transformers import AutoModelForCausalLM

from ftkit.memory import method_counts
from ftkit.plan import PlacementPlan
from ftkit.specs.model import FAMILIES, ArchitectureSpec
from ftkit.specs.training import (
    ALL_PROJECTIONS,
    ActivationCheckpointing,
    EngineName,
    LoraSpec,
    Method,
    Offload,
    Precision,
    TrainingSpec,
)
from ftkit.train.adapters import fill_adapters, prepare_method
from ftkit.train.counting import count_method
from ftkit.train.engines import make_engine
from ftkit.train.model import make_config
from ftkit.train.objective import MicroBatch, summed_loss
from ftkit.train.proofs import prove_isolation, prove_loss, prove_sharding
from ftkit.train.world import World, joined_world

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTH, VOCABULARY, STEPS, ACCUMULATION = 24, 320, 3, 2
TRIED = (*FAMILIES, "gpt_neox", "qwen2")
"""The four, and two that have what none of them has: fused projections, biases, names of their own."""
ADAPTED = {"gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")}


def cases() -> Iterator[tuple[str, Method, EngineName, Offload, Precision]]:
    for family, method, engine in product(TRIED, get_args(Method), get_args(EngineName)):
        yield family, method, engine, "none", "fp32"
    for offload, engine in product(("optimizer", "all"), get_args(EngineName)):
        yield "llama", "full", engine, offload, "fp32"
    for engine in get_args(EngineName):
        yield "olmo3", "qlora", engine, "none", "bf16"


def architecture(family: str) -> ArchitectureSpec:
    fields = {
        "family": family, "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 64, "tie_word_embeddings": family == "gemma3_text",
    }  # fmt: skip
    if family in {"gemma3_text", "olmo3"}:
        fields |= {"sliding_window": 6, "full_attention_every": 2}
    return ArchitectureSpec.model_validate(fields)


def checkpointing(family: str, engine: EngineName) -> ActivationCheckpointing:
    if family == "olmo3" and engine == "fsdp2":
        return "selective"
    return "full" if family in {"olmo3", "qwen3"} else "none"


def batch(step: int, accumulation: int, world: World) -> MicroBatch:
    generator = torch.Generator().manual_seed(100 * step + 10 * accumulation + world.rank)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).remainder(15).repeat(2, 1)  # two documents in each pack
    index = torch.arange(2 * LENGTH - 1)
    borders = torch.cat([torch.nonzero(positions.flatten() == 0)[:, 0], torch.tensor([tokens.numel()])]).int()
    return MicroBatch(tokens, positions, index, tokens.flatten()[1:], borders, tokens.numel())


def train(case: tuple[str, Method, EngineName, Offload, Precision], world: World) -> dict[str, Any]:
    family, method, engine_name, offload, precision = case
    shape = architecture(family)
    adapters = LoraSpec(targets=ADAPTED.get(family, ALL_PROJECTIONS)) if method != "full" else None
    training = TrainingSpec(
        method=method, lora=adapters, engine=engine_name, offload=offload, precision=precision, sequence_length=LENGTH,
        global_batch_size=2 * ACCUMULATION * world.size, max_steps=STEPS, learning_rate=1e-2, weight_decay=0.1,
        activation_checkpointing=checkpointing(family, engine_name),
    )  # fmt: skip
    ids = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(make_config(shape, ids))
    model.config.use_cache = False
    expected = count_method(model, training)
    if family in FAMILIES:
        assert expected == method_counts(shape, training)
    prepare_method(model, training)
    engine = make_engine(engine_name, model, training, world, lambda sharded: fill_adapters(sharded, 5))
    checks = prove_sharding(engine.facts(), training, expected)
    prove_isolation(engine, world, VOCABULARY, length=16)
    prove_loss(engine, world, VOCABULARY, length=16)
    num_targets = (2 * LENGTH - 1) * ACCUMULATION * world.size
    losses, norms = [], []
    for step in range(STEPS):
        loss = sum(
            engine.backward(batch(step, number, world), num_targets, is_last=number == ACCUMULATION - 1)
            for number in range(ACCUMULATION)
        )
        losses.append(world.sum([float(loss)])[0] / num_targets)
        norms.append(float(engine.step(1e-2, max_norm=0.5)))
    with engine.inference() as trained:
        held_out = world.sum([float(summed_loss(trained, batch(STEPS, 0, world)))])[0]
    weights = engine.trained_weights()
    length = sum(float(weight.double().square().sum()) for name, weight in weights.items() if name != "lm_head.weight")
    held = {part: sum(tensor.numel() for tensor in tensors) for part, tensors in engine.tensors().items()}
    return {
        "losses": losses, "norms": norms, "held_out": held_out, "length": length, "checks": checks, "held": held,
    }  # fmt: skip


def main() -> None:
    with joined_world(PlacementPlan(1, 2, "cpu", 1)) as world:
        results = {" ".join(case): train(case, world) for case in cases()}
        if world.is_first:
            Path(sys.argv[1]).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
    os._exit(0)  # as the trainer does: gloo's threads can abort while the interpreter ends
