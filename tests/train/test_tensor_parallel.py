"""Runs whose layers are divided among ranks train as runs with whole layers do; the families are in `test_engines`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from ftkit.errors import TrainingError
from ftkit.runs.records import EvaluationRecord, VerificationRecord
from ftkit.train.distributed.tensor_parallel import check_tensor_parallel
from ftkit.train.model.lora import ADAPTER_FILE

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.train.world import World

WORDS = (
    "training.precision=fp32",
    "training.max_steps=3",
    "training.micro_batch_size=1",
    "training.checkpoint_every_steps=1",
    "training.keep_checkpoints=3",
    "evaluation.sql_execution=null",
    "model.architecture.family=olmo3",
    "model.architecture.sliding_window=24",
)
DIVIDED = "training.tensor_parallel=2"


def assert_equal(losses: dict[int, Any], expected: dict[int, Any], first: int) -> None:
    assert set(losses) == set(range(first, 4))
    for step, numbers in losses.items():
        # AdamW's first steps have the size of the learning rate, however small a gradient is: rounding grows.
        assert numbers == pytest.approx(expected[step], rel=2e-6 if step == first else 1e-4), step


def test_a_run_with_divided_layers_trains_as_one_with_whole_layers_and_each_resumes_the_other(
    make_run: Callable[..., Any], world: World
) -> None:
    whole = make_run("whole-layers", *WORDS, processes=1)
    whole.train_here(world)
    expected = whole.losses()
    divided = make_run("divided-layers", *WORDS, DIVIDED, processes=4)
    divided.train()
    assert_equal(divided.losses(), expected, 1)
    before, after = ([record.loss for record in run.records(EvaluationRecord)] for run in (whole, divided))
    assert after == pytest.approx(before, rel=1e-4)
    assert divided.records(VerificationRecord)[0].checks["documents are"] == "packed"

    resumed = make_run("whole-again", *WORDS, processes=1)
    divided.copy_to(resumed.plan.id)
    resumed.forget_after(1)
    resumed.train_here(world)
    assert_equal(resumed.losses(), expected, 2)

    divided_again = make_run("divided-again", *WORDS, DIVIDED, processes=2)
    resumed.copy_to(divided_again.plan.id)
    divided_again.forget_after(2)
    divided_again.train()
    assert_equal(divided_again.losses(), expected, 3)


def test_adapters_are_divided_with_their_dropout_and_saved_whole(make_run: Callable[..., Any], world: World) -> None:
    words = (*WORDS, "training.method=lora", "training.lora={rank: 4, dropout: 0.2, use_dora: true}")
    whole = make_run("whole-adapters", *words, processes=1)
    whole.train_here(world)
    divided = make_run("divided-adapters", *words, DIVIDED, processes=2)
    divided.train()
    assert_equal(divided.losses(), whole.losses(), 1)
    saved, expected = (load_file(run.layout.export / ADAPTER_FILE) for run in (divided, whole))
    assert {name: weight.shape for name, weight in saved.items()} == {
        name: weight.shape for name, weight in expected.items()
    }
    for name, weight in saved.items():
        assert (weight - expected[name]).norm() <= 1e-2 * expected[name].norm(), name

    resumed = make_run("whole-adapters-again", *words, processes=1)
    divided.copy_to(resumed.plan.id)
    resumed.forget_after(1)
    resumed.train_here(world)
    assert_equal(resumed.losses(), whole.losses(), 2)

    divided_again = make_run("divided-adapters-again", *words, DIVIDED, processes=2)
    whole.copy_to(divided_again.plan.id)
    divided_again.forget_after(2)
    divided_again.train()
    assert_equal(divided_again.losses(), whole.losses(), 3)


@pytest.mark.parametrize(
    ("config", "kernel", "reason"),
    [
        (AutoConfig.for_model("llama", num_attention_heads=8, num_key_value_heads=2), "sdpa", "2 key-value heads"),
        (AutoConfig.for_model("llama"), "eager", "the kernel 'eager'"),
        (AutoConfig.for_model("qwen2"), "sdpa", "gemma3_text, llama, olmo3, qwen3"),
    ],
)
def test_models_whose_layers_can_t_be_divided_are_refused(config: Any, kernel: Any, reason: str) -> None:
    with pytest.raises(TrainingError, match=reason):
        check_tensor_parallel(config, kernel, 4)
    check_tensor_parallel(AutoConfig.for_model("llama"), "sdpa", 4)
