from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ftkit.evaluate.results import Ratio, paired_interval

SCORES = st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=1, max_size=20)


def ratio(values: object) -> Ratio:
    numerators = np.asarray(values, np.float64)
    return Ratio(numerators, np.ones_like(numerators))


@given(SCORES, st.integers(0, 1000))
def test_the_interval_is_within_the_row_differences_and_reproducible(
    scores: list[tuple[float, float]], seed: int
) -> None:
    after, before = (ratio(each) for each in zip(*scores, strict=True))
    low, high = paired_interval((after, before), np.subtract, seed, num_resamples=150)
    assert (low, high) == paired_interval((after, before), np.subtract, seed, num_resamples=150)
    differences = after.numerators - before.numerators
    assert differences.min() - 1e-9 <= low <= high <= differences.max() + 1e-9


def test_an_equal_gain_of_all_rows_has_no_uncertainty_when_paired() -> None:
    before = np.random.default_rng(0).normal(size=50)
    low, high = paired_interval((ratio(before + 1), ratio(before)), np.subtract, seed=0)
    assert (round(low, 9), round(high, 9)) == (1, 1)


def test_95_percent_of_intervals_contain_the_true_value() -> None:
    rng = np.random.default_rng(0)
    intervals = [paired_interval((ratio(rng.normal(size=60)),), np.asarray, seed, 400) for seed in range(150)]
    assert 0.88 <= np.mean([low <= 0 <= high for low, high in intervals]) <= 0.99


def test_rows_without_the_metric_do_not_count() -> None:
    only_one = Ratio(np.array([1.0, 0.0, 0.0]), np.array([1.0, 0.0, 0.0]))
    assert only_one.value == 1
    assert paired_interval((only_one,), np.asarray, seed=0) == (1, 1)
