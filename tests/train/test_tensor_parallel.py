"""Runs whose layers are divided among ranks train as runs with whole layers do; the families are in `test_engines`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from ftkit.errors import TrainingError
from ftkit.models.folder import ADAPTER_FILE
from ftkit.runs.records import EvaluationRecord, VerificationRecord
from ftkit.train.checkpoint.loading import read_state, saved_sizes
from ftkit.train.components.optimizer import _code
from ftkit.train.distributed.pack_parallel import check_tensor_parallel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ftkit.train.world import World

WORDS = (
    "training.precision=fp32",
    "training.max_steps=3",
    "training.micro_batch_size=1",
    "training.checkpoint_every_steps=1",
    "training.keep_checkpoints=3",
    "evaluation.generation=null",
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

    with_parts_of_packs = make_run("divided-packs", *WORDS, DIVIDED, "training.context_parallel=2", processes=4)
    resumed.copy_to(with_parts_of_packs.plan.id)
    with_parts_of_packs.forget_after(2)
    with_parts_of_packs.train()
    assert_equal(with_parts_of_packs.losses(), expected, 3)
    assert with_parts_of_packs.records(VerificationRecord)[0].checks["documents are"] == "packed"


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


WHOLE_BLOCKS = ("hidden_size=512", "intermediate_size=512", "head_dim=128", "num_hidden_layers=1")


@pytest.mark.parametrize(
    ("sizes", "processes", "tolerance"), [(WHOLE_BLOCKS, 2, 1e-3), (("intermediate_size=96",), 4, 3e-2)]
)
def test_8_bit_states_equal_those_of_whole_layers_if_rows_on_a_rank_are_whole_blocks_else_they_are_close(
    sizes: tuple[str, ...], processes: int, tolerance: float, make_run: Callable[..., Any], world: World
) -> None:
    words = (*WORDS, *(f"model.architecture.{size}" for size in sizes), "training.optimizer=adamw8bit")
    words = (*words, "training.max_steps=2")
    name = f"8-bit-{processes}"
    whole = make_run(f"{name}-whole", *words, processes=1)
    whole.train_here(world)
    divided = make_run(f"{name}-divided", *words, DIVIDED, processes=processes)
    divided.train()
    assert divided.losses()[1] == pytest.approx(whole.losses()[1], rel=1e-5)
    assert_close_moments(divided, whole, 1, tolerance)

    if sizes == WHOLE_BLOCKS:
        resumed = make_run(f"{name}-whole-again", *words, processes=1)
        divided.copy_to(resumed.plan.id)
        resumed.forget_after(1)
        resumed.train_here(world)
    else:
        resumed = whole.copy_to(f"{name}-divided-again")
        resumed = replace(resumed, plan=replace(divided.plan, id=resumed.plan.id))
        resumed.forget_after(1)
        resumed.train()
    assert_close_moments(resumed, whole, 2, 2 * tolerance)
    assert resumed.losses() == {2: pytest.approx(whole.losses()[2], rel=tolerance)}


def assert_close_moments(run: Any, expected: Any, step: int, tolerance: float) -> None:
    """Compare the states of two runs' checkpoints, dequantized."""
    one, other = (moments(each.layout.checkpoint(step)) for each in (run, expected))
    assert one.keys() == other.keys()
    for name, moment in one.items():
        assert (moment - other[name]).norm() <= tolerance * other[name].norm(), name


def moments(checkpoint: Path) -> dict[str, torch.Tensor]:
    prefix, found = "optimizer.state.", {}
    sizes = saved_sizes(checkpoint, prefix)
    for name in [name.removesuffix("_8bit") for name in sizes if name.endswith("_8bit")]:
        stored = torch.empty(sizes[f"{name}_8bit"], dtype=torch.uint8)
        scales = torch.empty(sizes[f"{name}_absmax"])
        read_state({f"{prefix}{name}_8bit": stored, f"{prefix}{name}_absmax": scales}, checkpoint)
        code = _code(name.rpartition(".")[2], stored.device)
        found[name] = code[stored.long()] * scales.repeat_interleave(stored.shape[-1] // scales.shape[-1], dim=-1)
    return found


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
