"""Context parallelism: runs that split packs over ranks train like runs that don't."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoConfig

from ftkit.errors import TrainingError
from ftkit.runs.records import EvaluationRecord, VerificationRecord
from ftkit.train.distributed.pack_parallel import check_context_parallel

if TYPE_CHECKING:
    from collections.abc import Callable

FP32 = ("training.precision=fp32", "training.max_steps=4", "evaluation.generation=null")
FAMILIES = {
    "qwen3": ("training.method=lora",),
    "llama": ("training.activation_checkpointing=except_attention",),
    "olmo3": ("model.architecture.sliding_window=24", "training.activation_checkpointing=full"),
    "gemma3_text": ("model.architecture.sliding_window=24", "training.activation_checkpointing=selective"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_context_parallel_run_trains_as_one_without(family: str, make_run: Callable[..., Any]) -> None:
    words = (*FP32, f"model.architecture.family={family}", *FAMILIES[family])
    whole = make_run(f"whole-{family}", *words, processes=1)
    divided = make_run(f"divided-{family}", "training.context_parallel=2", *words, processes=2)
    for run in (whole, divided):
        run.train()
    expected = whole.losses()
    assert len(expected) == 4
    for step, numbers in divided.losses().items():
        # AdamW's first steps have the size of the learning rate even for tiny gradients, which amplifies rounding.
        assert numbers == pytest.approx(expected[step], rel=2e-6 if step == 1 else 1e-4), step
    before, after = ([record.loss for record in run.records(EvaluationRecord)] for run in (whole, divided))
    assert after == pytest.approx(before, rel=1e-4)
    assert divided.records(VerificationRecord)[0].checks["documents are"] == "packed"


def test_a_run_resumes_with_more_context_parallel_ranks_than_key_heads(make_run: Callable[..., Any]) -> None:
    words = (*FP32, "training.checkpoint_every_steps=2")
    whole = make_run("whole", *words, processes=2)
    whole.train()
    divided = make_run("divided-4", "training.context_parallel=4", *words, processes=4)
    resumed = whole.copy_to("divided-4")
    resumed.forget_after(2)
    divided.train()
    expected, losses = whole.losses(), divided.losses()
    assert set(losses) == {3, 4}
    for step, numbers in losses.items():
        assert numbers == pytest.approx(expected[step], rel=2e-6 if step == 3 else 1e-4), step


@pytest.mark.parametrize(
    ("config", "kernel", "reason"),
    [
        ({"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}, "sdpa", "6 attention heads"),
        ({}, "eager", "the kernel 'eager'"),
    ],
)
def test_models_without_context_parallel_support_are_rejected(config: dict[str, int], kernel: Any, reason: str) -> None:
    refused = AutoConfig.for_model("llama", **config)
    with pytest.raises(TrainingError, match=reason):
        check_context_parallel(refused, kernel, 4)
    check_context_parallel(AutoConfig.for_model("llama"), "sdpa", 4)


def test_layers_with_recurrent_state_are_rejected() -> None:
    mixed = AutoConfig.for_model("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"])
    with pytest.raises(TrainingError, match="type conv"):
        check_context_parallel(mixed, "sdpa", 2)
