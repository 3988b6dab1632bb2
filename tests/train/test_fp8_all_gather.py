"""Weights that are all-gathered in FP8: several processes train as one does, which rounds whole matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

WORDS = (
    "training.precision=fp8",
    "training.max_steps=3",
    "training.micro_batch_size=1",
    "training.global_batch_size=12",
    "training.checkpoint_every_steps=1",
    "training.keep_checkpoints=3",
    "evaluation.sql_execution=null",
)


def test_several_processes_train_as_one_that_gathers_nothing_and_resume_each_others_checkpoints(
    make_run: Callable[..., Any],
) -> None:
    alone = make_run("fp8-alone", *WORDS, processes=1)
    assert "all-gathered" not in alone.train()
    expected = alone.losses()
    for processes, settings in (
        (2, ("training.reshard_after_forward=never",)),
        (3, ("training.activation_checkpointing=full", "training.sync_gradients=last_micro_batch")),
        (4, ("training.shard_degree=2", "training.activation_checkpointing=selective")),
    ):
        run = make_run(f"fp8-on-{processes}", *WORDS, *settings, processes=processes)
        alone.copy_to(run.plan.id)
        run.forget_after(1)
        assert "weights are all-gathered in FP8" in run.train()
        (loss, norm), last = run.losses()[2], run.losses()[3]
        assert loss == pytest.approx(expected[2][0], rel=1e-7), processes  # the same numbers were multiplied
        # Gradients in bf16 are rounded otherwise if they are divided by three.
        assert norm == pytest.approx(expected[2][1], rel=1e-3 if processes == 3 else 1e-6), processes
        assert last == pytest.approx(expected[3], rel=1e-3), processes
