"""Linear attention on a GPU: compiled, with whatever kernels are installed."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.config.training import TrainingPlan
from ftkit.models.architecture import ArchitectureSpec
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.distributed.probe import run_probe
from ftkit.train.distributed.verification import verify_causality, verify_isolation, verify_logits
from ftkit.train.model.attention import choose_kernel, register_kernel
from ftkit.train.model.hf_model import build_empty, make_config
from ftkit.train.model.pretrained import init_weights
from ftkit.train.model.token_mixers import choose_token_mixers

if TYPE_CHECKING:
    from ftkit.config.training import ActivationCheckpointing
    from ftkit.train.world import World

pytestmark = pytest.mark.gpu
LENGTH, VOCABULARY = 512, 1000
IDS: Any = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=0)


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_compiled_linear_attention_isolates_packed_documents(
    checkpointing: ActivationCheckpointing, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    shape = ArchitectureSpec(
        family="qwen3_5_text", vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=LENGTH,
        initializer_range=0.08, full_attention_every=4,
    )  # fmt: skip
    training = TrainingPlan(
        sequence_length=LENGTH, global_batch_size=2, micro_batch_size=2, max_steps=1, learning_rate=1e-3,
        precision="bf16", compile="layers", activation_checkpointing=checkpointing,
    )  # fmt: skip
    config = make_config(shape, IDS)
    kernel, _ = choose_kernel(training, config, world)
    model = build_empty(config, register_kernel(kernel))
    choices = choose_token_mixers(model, world)
    assert {choice.split(":")[0] for choice in choices} == {"causal_conv1d_fn", "chunk_gated_delta_rule"}
    with caplog.at_level(logging.WARNING, logger="ftkit"):
        engine = Fsdp2Engine(model, training, world, lambda sharded: init_weights(sharded, shape, 0))
        probe = run_probe(engine, world, VOCABULARY, micro_batch_size=2, sequence_length=LENGTH)
    verify_causality(probe)
    verify_isolation(probe)
    verify_logits(probe)
    assert not [record for record in caplog.records if "can't be compiled" in record.getMessage()]
