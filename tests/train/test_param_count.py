"""Models counted without their weights, and what a run makes of it."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ftkit.config.model import FAMILIES, ArchitecturePlan, ArchitectureSpec, ModelSpec
from ftkit.config.training import LoraSpec, TrainingPlan
from ftkit.launch.param_count import count_on_this_machine
from ftkit.planning.estimates.adapters import adapter_size
from ftkit.planning.estimates.parameters import EXPERT_FAMILIES, count_by_config, count_model, method_counts
from ftkit.planning.layout import Workspace
from ftkit.runs.records import StartRecord, VerificationRecord
from ftkit.train.param_count import count_method, count_modules

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}


def shape_of(family: str) -> ArchitectureSpec:
    return ArchitectureSpec(
        family=family, vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
    )  # fmt: skip


def config_of(shape: ArchitectureSpec, more: dict[str, Any]) -> dict[str, Any]:
    names = set(ArchitectureSpec.model_fields) - {"family", "full_attention_every", "sliding_window"}
    return {"model_type": shape.family} | shape.model_dump(include=names) | more


def build(config: dict[str, Any]) -> Any:
    kind = config["model_type"]
    fields = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))


@pytest.mark.oldest
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_the_formula_of_experts_is_that_of_the_real_class(family: str) -> None:
    shape = shape_of(family)
    config = config_of(shape, EXPERTS[family])
    planned, counted = count_by_config(shape, config), count_modules(build(config), shape.intermediate_size)
    assert planned.is_exact
    for name in ("layers", "largest_layer", "around", "feed_forward", "experts_per_token"):
        assert getattr(planned, name) == getattr(counted, name), name
    assert counted.active == pytest.approx(planned.active, rel=0.02)  # the formula has vectors too


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_of_a_model_lead_to_those_of_each_method(family: str) -> None:
    shape = shape_of(family)
    model = build(config_of(shape, {"sliding_window": 64} if family in {"gemma3_text", "olmo3"} else {}))
    counts = count_modules(model, shape.intermediate_size)
    assert (counts.total, counts.active) == (count_model(shape).total, count_model(shape).active)
    for method in ("full", "lora", "qlora"):
        training = TrainingPlan(method=method, sequence_length=8, global_batch_size=1, max_steps=1, learning_rate=1e-3)
        assert method_counts(ArchitecturePlan.of(shape, counts), training) == count_method(model, training)


def test_a_model_without_a_formula_is_counted_in_a_process_of_its_own(tmp_path: Path) -> None:
    shape = shape_of("gpt_oss")
    config = config_of(shape, {"num_local_experts": 4, "num_experts_per_tok": 2})
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelSpec(weights=str(tmp_path), architecture=shape)
    counts = count_on_this_machine(model, os.environ, Workspace(tmp_path))
    assert counts is not None
    assert counts.source == "model"
    real = build(config)
    assert counts.total == sum(parameter.numel() for parameter in real.parameters())
    (linear,) = (each for each in counts.linears if each.name == "q_proj")
    assert adapter_size(LoraSpec(rank=1), linear.inputs, linear.outputs) == 64 + 64


def test_a_run_acts_on_the_parameters_of_the_real_model(make_run: Callable[..., Any]) -> None:
    family = "model.architecture.family=qwen2"  # whose biases an estimate leaves out
    run = make_run("counted", family, "training.max_steps=1", "evaluation.sql_execution=null")
    printed = run.train()
    (start,), (proof,) = run.records(StartRecord), run.records(VerificationRecord)
    assert proof.checks["parameters"] == f"{start.num_parameters:,}"
    estimate = f"the plan's estimate was {run.plan.num_parameters:,}"
    assert f"the model has {start.num_parameters:,} parameters, {estimate}" in printed
