from __future__ import annotations

import itertools
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.config.training import TrainingPlan
from ftkit.train.components.optimizer import learning_rate_at


def training(schedule: Literal["constant", "cosine", "linear"], warmup: float = 0.1, low: float = 0.0) -> TrainingPlan:
    return TrainingPlan(
        sequence_length=8,
        global_batch_size=8,
        max_steps=100,
        learning_rate=2.0,
        schedule=schedule,
        warmup_ratio=warmup,
        min_learning_rate_ratio=low,
    )


def test_the_warmup_ends_at_the_highest_learning_rate() -> None:
    rates = [learning_rate_at(step, 100, training("constant")) for step in range(12)]
    assert rates[:3] == pytest.approx([0.2, 0.4, 0.6])
    assert rates[9:] == pytest.approx([2.0, 2.0, 2.0])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_is_halfway_down_at_half_of_the_decay(schedule: Literal["cosine", "linear"]) -> None:
    assert learning_rate_at(55, 100, training(schedule)) == pytest.approx(1.0)
    assert learning_rate_at(55, 100, training(schedule, low=0.5)) == pytest.approx(1.5)


@given(st.integers(1, 500), st.floats(0, 1), st.floats(0, 1), st.sampled_from(["constant", "cosine", "linear"]))
def test_the_learning_rate_stays_in_bounds_and_never_rises_after_the_warmup(
    num_steps: int, warmup: float, low: float, schedule: Literal["constant", "cosine", "linear"]
) -> None:
    spec = training(schedule, warmup, low)
    rates = [learning_rate_at(step, num_steps, spec) for step in range(num_steps)]
    assert all(0 <= rate <= 2.0 for rate in rates)
    after = rates[round(warmup * num_steps) :]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
