"""Model FLOPs utilization: the share of the GPUs' peak that a run uses (MFU; Chowdhery et al. 2022, appendix B)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ftkit.data.packing import find_padding
from ftkit.planning.estimates.flops import token_flops
from ftkit.planning.estimates.parameters import count_model
from ftkit.planning.setup import gpu_of_device

if TYPE_CHECKING:
    from ftkit.config.recipe import RecipePlan
    from ftkit.data.store import PackStore
    from ftkit.train.world import World

NUM_SAMPLED_PACKS = 64


@dataclass(frozen=True)
class MfuMeter:
    """Converts a throughput to MFU.

    Attributes:
        flops_per_pack: FLOPs of an average pack, forward and backward (`ftkit.planning.estimates.step_time`), without
            padding, which is computed but not useful.
        peak_flops: FLOP/s of all GPUs; None if the GPU is unknown, or the model's FLOPs are an estimate.
    """

    flops_per_pack: float
    peak_flops: float | None

    def mfu(self, packs_per_second: float) -> float | None:
        """Return MFU from 0 to 1; None without a known peak."""
        return None if self.peak_flops is None else packs_per_second * self.flops_per_pack / self.peak_flops


def make_mfu_meter(recipe: RecipePlan, store: PackStore, world: World) -> MfuMeter:
    """Count the FLOPs of an average pack, on packs spread evenly over the data.

    A token attends only to its own document, and the output projection is computed only for targets.
    """
    packs = store.read(range(0, len(store), -(-len(store) // NUM_SAMPLED_PACKS)))
    positions = packs[:, 2]
    is_real = ~find_padding(packs)
    keys = positions[is_real] + 1
    shape, window = recipe.model.architecture, recipe.model.architecture.sliding_window
    in_window = keys if window is None else np.minimum(keys, window)
    targets = float(store.num_targets.mean()) * len(packs) / len(keys)
    flops = token_flops(shape, recipe.training, float(keys.mean()), float(in_window.mean()), targets)
    is_known = world.device.type == "cuda" and count_model(shape).is_exact
    gpu = gpu_of_device(torch.cuda.get_device_name(world.device)) if is_known else None
    return MfuMeter(
        flops.total * len(keys) / len(packs),
        None if gpu is None else world.size * gpu.peak_flops(recipe.training.compute_precision),
    )
