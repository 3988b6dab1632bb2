"""The order in which packs are trained on: a function of seed, epoch and index alone."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@lru_cache(maxsize=2)
def _permutation(num_packs: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_packs)


def pack_at(index: int, num_packs: int, seed: int) -> int:
    """Return the number of the `index`-th pack in training order, counting over all epochs.

    Each pack occurs once in each epoch. The order is independent of world size, batch size and restarts, so a run that
    continues on another number of GPUs sees each pack as often as an uninterrupted run.
    """
    epoch, position = divmod(index, num_packs)
    return int(_permutation(num_packs, seed, epoch)[position])
