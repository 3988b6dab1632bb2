"""Whole runs of models whose family ftkit knows only through transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoModelForCausalLM

from ftkit.runs.records import EvaluationRecord, StartRecord, VerificationRecord

if TYPE_CHECKING:
    from collections.abc import Callable

SHORT = ("training.max_steps=3", "evaluation.generation=null")


@pytest.fixture(scope="module")
def with_biases(make_run: Callable[..., Any]) -> Any:
    """A Qwen 2 model, which has biases, trained from random weights."""
    run = make_run("qwen2", "model.architecture.family=qwen2", *SHORT)
    run.train()
    return run


def test_the_plan_of_an_unmeasured_family_has_exact_param_counts_and_marks_the_rest_as_estimates(
    with_biases: Any,
) -> None:
    (note,) = with_biases.plan.notes
    assert "'qwen2' is none of gemma3_text, llama, olmo3, qwen3: parameters are counted exactly, memory and" in note
    model = AutoModelForCausalLM.from_pretrained(with_biases.layout.export)
    true = sum(parameter.numel() for parameter in model.parameters())
    (start,) = with_biases.records(StartRecord)
    assert start.num_parameters == true
    assert start.num_parameters == with_biases.plan.num_parameters
    (proof,) = with_biases.records(VerificationRecord)
    assert proof.checks["parameters"] == true


def test_an_export_with_biases_is_trained_further_with_4_bit_weights(
    with_biases: Any, make_run: Callable[..., Any]
) -> None:
    source = f"model.weights={with_biases.layout.export}"
    for method, tolerance in (("lora", 1e-6), ("qlora", 1e-2)):
        run = make_run(
            f"qwen2-{method}", source, "model.architecture.family=qwen2", f"training.method={method}", *SHORT
        )
        run.train()
        before, after = run.records(EvaluationRecord)
        assert before.loss == pytest.approx(with_biases.records(EvaluationRecord)[-1].loss, rel=tolerance)
        assert after.loss < before.loss
        is_quantized = run.records(VerificationRecord)[0].checks["quantized parameters"] != 0
        assert is_quantized == (method == "qlora")


def test_weights_of_another_family_are_rejected(with_biases: Any, make_run: Callable[..., Any]) -> None:
    run = make_run(
        "mistaken", f"model.weights={with_biases.layout.export}", "model.architecture.family=mistral", *SHORT
    )
    run.train(expect=9)
    assert "family: mistral in the recipe, qwen2 in the weights" in run.first_error().message


def test_adapters_on_missing_projections_are_rejected_before_training(make_run: Callable[..., Any]) -> None:
    run = make_run("fused", "model.architecture.family=phi3", "training.method=lora", *SHORT)
    run.train(expect=9)
    message = run.first_error().message
    assert "no linear layer q_proj, k_proj, v_proj, gate_proj, up_proj" in message
    assert "qkv_proj" in message
