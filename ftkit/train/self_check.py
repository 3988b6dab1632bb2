"""`python -m ftkit.train.self_check`: check that this environment can train. The imports are part of the check."""

from __future__ import annotations

import os
import sys
from typing import Literal

import numpy as np
import torch

from ftkit.config.execution import method_counts
from ftkit.config.training import TrainingPlan
from ftkit.data.packing import Document, build_pack
from ftkit.data.tokenizers import learn_tokenizer
from ftkit.errors import FtkitError
from ftkit.models.architecture import ArchitectureSpec
from ftkit.models.families import MEASURED
from ftkit.planning.plan import PlacementPlan
from ftkit.train.components.batches import to_micro_batch
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.distributed.probe import run_probe
from ftkit.train.distributed.verification import verify_isolation, verify_logits, verify_sharding
from ftkit.train.model.attention import choose_kernel, register_kernel
from ftkit.train.model.hf_model import build_empty, make_config
from ftkit.train.model.pretrained import init_weights
from ftkit.train.world import World, init_world

_VOCABULARY, _LENGTH = 320, 256


def main() -> int:
    """Take a training step with each family, on the first GPU if there is one; print families and losses."""
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})  # any port that is free
    try:
        with init_world(PlacementPlan(1, 1, device, 1)) as world:
            losses = {family: take_step(family, world) for family in MEASURED}
    except FtkitError as error:
        sys.stderr.write(f"ftkit.train: error: {error}\n")
        return error.exit_code
    trained = ", ".join(f"{family} (loss {loss:.2f})" for family, loss in losses.items())
    sys.stdout.write(f"ftkit.train: trained on {device}: {trained}\n")
    return 0


def take_step(family: str, world: World) -> float:
    """Build, verify and train a tiny model of a family; return its mean loss, in nats."""
    shape = ArchitectureSpec(
        family=family, vocab_size=_VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, max_position_embeddings=2 * _LENGTH,
        sliding_window=_LENGTH // 2, full_attention_every=2,
    )  # fmt: skip
    precision = "bf16" if world.device.type == "cuda" else "fp32"
    training = TrainingPlan(
        precision=precision, sequence_length=_LENGTH, global_batch_size=1, max_steps=1, learning_rate=1e-3
    )
    config = make_config(shape, learn_tokenizer(["self-check"], 300, "chatml"))
    kernel, _ = choose_kernel(training, config, world)
    model = build_empty(config, register_kernel(kernel))
    engine = Fsdp2Engine(model, training, world, lambda sharded: init_weights(sharded, shape, 0))
    verify_sharding(engine.sharding_stats(), training, method_counts(shape, training))
    probe = run_probe(engine, world, _VOCABULARY, micro_batch_size=1, sequence_length=_LENGTH)
    verify_isolation(probe)
    verify_logits(probe)
    tokens = np.arange(_LENGTH, dtype=np.int32)
    pack = build_pack([Document(tokens, np.roll(tokens, -1))], _LENGTH)
    loss = engine.forward(to_micro_batch(pack[None], world.device))
    engine.backward(loss, _LENGTH, is_last=True)
    engine.step(training.learning_rate, training.max_grad_norm)
    return float(loss.detach()) / _LENGTH  # host sync: once per family


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without exit handlers: gloo's threads can abort in them
