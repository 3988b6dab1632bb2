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
    """Return which pack is the `index`-th to be trained on, counting over all epochs.

    Each pack comes once in each epoch. World size, batch size and restarts play no part, so a run that goes
    on with other numbers sees each pack as often as one that was never interrupted.
    """
    epoch, position = divmod(index, num_packs)
    return int(_permutation(num_packs, seed, epoch)[position])
