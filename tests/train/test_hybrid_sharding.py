"""Hybrid sharding: replicas that are each sharded over a few ranks train like one fully sharded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

# Two micro-batches per step, of one rank or of a group of two.
WORDS = (
    "training.precision=fp32",
    "training.max_steps=3",
    "training.micro_batch_size=1",
    "training.global_batch_size=8",
    "training.optimizer=adamw8bit",
    "training.checkpoint_every_steps=1",
    "training.keep_checkpoints=3",
    "evaluation.generation=null",
)
HYBRID = "training.shard_degree=2"


def assert_equal(losses: dict[int, Any], expected: dict[int, Any], first: int = 1) -> None:
    assert set(losses) == set(range(first, 4))
    for step, numbers in losses.items():
        # AdamW's first steps have the size of the learning rate even for tiny gradients, which amplifies rounding.
        assert numbers == pytest.approx(expected[step], rel=2e-6 if step == first else 1e-4), step


def test_hybrid_sharding_trains_as_full_sharding_and_resumes_on_any_number_of_processes(
    make_run: Callable[..., Any],
) -> None:
    whole = make_run("fully-sharded", *WORDS, processes=2)
    whole.train()
    expected = whole.losses()
    divided = make_run("replicas", *WORDS, HYBRID, "training.context_parallel=2", processes=4)
    divided.train()
    assert_equal(divided.losses(), expected)

    fewer, resumed = divided, [make_run(f"replicas-on-{size}", *WORDS, processes=size) for size in (2, 1)]
    for first, run in enumerate(resumed, 2):
        fewer.copy_to(run.plan.id)
        run.forget_after(first - 1)
        run.train()
        assert_equal(run.losses(), expected, first)
        fewer = run

    deferred = make_run(
        "replicas-again", *WORDS, HYBRID, "training.sync_gradients=last_micro_batch",
        "training.reshard_after_forward=never", processes=4,
    )  # fmt: skip
    assert (deferred.plan.engine.num_replicas, deferred.plan.engine.defers_sync) == (2, True)
    assert "2 replicas of 2 shards; layers stay unsharded; gradients are reduced once per step" in (
        deferred.plan.engine.reason
    )
    fewer.copy_to(deferred.plan.id)
    deferred.forget_after(1)
    deferred.train()
    assert_equal(deferred.losses(), expected, 2)
