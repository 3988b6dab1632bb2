from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ftkit.data.inspection import median_of


@given(st.lists(st.integers(1, 50), max_size=30))
def test_the_median_of_a_histogram_matches_that_of_the_lengths(lengths: list[int]) -> None:
    assert median_of(Counter(lengths)) == (np.median(lengths) if lengths else 0)
