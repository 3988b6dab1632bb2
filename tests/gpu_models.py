"""Small models for tests on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ftkit.config.training import TrainingPlan
from ftkit.models.architecture import ArchitectureSpec

LENGTH, VOCABULARY = 512, 1000
IDS: Any = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=0)


def training(**changes: Any) -> TrainingPlan:
    fields = {"sequence_length": LENGTH, "global_batch_size": 2, "micro_batch_size": 2, "max_steps": 1}
    return TrainingPlan.model_validate({"learning_rate": 1e-3, "precision": "bf16", **fields, **changes})


def architecture(family: str, **changes: Any) -> ArchitectureSpec:
    fields = {
        "family": family, "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "max_position_embeddings": LENGTH, "initializer_range": 0.08,
    }  # fmt: skip
    return ArchitectureSpec.model_validate(fields | changes)
