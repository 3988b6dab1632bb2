"""Confidence intervals of ratios of sums, by the bootstrap over rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_RESAMPLES = 2000
_BATCH_SIZE = 100
"""Resamples per batch, which bounds the memory."""
_PERCENTILES = (2.5, 97.5)

Interval = tuple[float, float]


@dataclass(frozen=True)
class Ratio:
    """A metric as a ratio of sums over rows: of losses and tokens, or of scores and turns.

    Attributes:
        numerators: float64, one for each row.
        denominators: float64, one for each row; 0 if the metric does not apply to the row.
    """

    numerators: NDArray[np.float64]
    denominators: NDArray[np.float64]

    @property
    def value(self) -> float:
        """The ratio over all rows."""
        return float(self.numerators.sum() / self.denominators.sum())


def paired_interval(
    ratios: tuple[Ratio, ...],
    combine: Callable[..., NDArray[np.float64]],
    seed: int,
    num_resamples: int = NUM_RESAMPLES,
) -> Interval:
    """Return the 95% interval of a function of ratios over the same rows, by percentiles.

    The rows of a resample are the same for all ratios, so the difficulty of a row cancels in the difference of two
    models (Efron and Tibshirani 1993, chapter 13).

    Args:
        ratios: ratios over the same rows.
        combine: takes an array of values for each ratio, one value for each resample.
        seed: seed of the random resamples.
        num_resamples: number of resamples.
    """
    rng, num_rows = np.random.default_rng(seed), len(ratios[0].numerators)
    found = []
    for begin in range(0, num_resamples, _BATCH_SIZE):
        size = min(_BATCH_SIZE, num_resamples - begin)
        drawn = rng.multinomial(num_rows, np.full(num_rows, 1 / num_rows), size=size).astype(np.float64)
        sums = [(drawn @ ratio.numerators, drawn @ ratio.denominators) for ratio in ratios]
        # A resample without a row to which the metric applies has no value.
        is_used = np.all([below > 0 for _, below in sums], axis=0)
        found.append(combine(*(above[is_used] / below[is_used] for above, below in sums)))
    low, high = np.percentile(np.concatenate(found), _PERCENTILES)
    return float(low), float(high)
