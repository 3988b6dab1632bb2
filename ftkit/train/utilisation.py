"""How much of the GPUs' peak a run makes use of (MFU)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ftkit.flops import token_flops
from ftkit.gpus import gpu_of_device

if TYPE_CHECKING:
    from ftkit.data.store import PackStore
    from ftkit.specs.recipe import RecipeSpec
    from ftkit.train.world import World

NUM_SAMPLED_PACKS = 64


@dataclass(frozen=True)
class Utilisation:
    """What a token costs in these packs, and what all GPUs could do.

    Attributes:
        flops_per_token: operations, forward and backward (`ftkit.flops`).
        peak_flops: of all GPUs, a second; none: their kind is not known, or the operations are an estimate.
    """

    flops_per_token: float
    peak_flops: float | None

    def mfu(self, tokens_per_second: float) -> float | None:
        """Return which part of the peak a speed is. Never a guess: without a known peak there is none."""
        return None if self.peak_flops is None else tokens_per_second * self.flops_per_token / self.peak_flops


def measure_utilisation(recipe: RecipeSpec, store: PackStore, world: World) -> Utilisation:
    """Count what a token costs on average, from packs spread evenly over the data.

    Tokens see their own document alone, and the output projection is computed for targets alone.
    """
    packs = store.packs[:: -(-len(store) // NUM_SAMPLED_PACKS)]
    keys = packs[:, 2] + 1
    shape, window = recipe.model.architecture, recipe.model.architecture.sliding_window
    in_window = keys if window is None else np.minimum(keys, window)
    targets = float(store.num_targets.sum()) / store.packs[:, 0].size
    flops = token_flops(shape, recipe.training, float(keys.mean()), float(in_window.mean()), targets)
    is_known = world.device.type == "cuda" and not shape.is_estimated
    gpu = gpu_of_device(torch.cuda.get_device_name(world.device)) if is_known else None
    return Utilisation(flops.total, None if gpu is None else world.size * gpu.peak_flops)
