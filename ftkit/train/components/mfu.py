"""Model FLOPs utilization: the share of the GPUs' peak that a run uses (MFU; Chowdhery et al. 2022, appendix B)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ftkit.config.recipe import RecipePlan
from ftkit.planning.estimates.flops import token_flops
from ftkit.planning.estimates.parameters import count_model
from ftkit.planning.setup import gpu_of_device

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ftkit.config.model import ArchitectureSpec
    from ftkit.config.training import TrainingSpec
    from ftkit.train.world import World


def count_flops(shape: ArchitectureSpec, training: TrainingSpec, lengths: NDArray[np.int64], num_targets: int) -> float:
    """Count the FLOPs of documents, forward and backward; recomputation and padding are not counted.

    A token attends only to its own document, and the output projection is computed only for targets.

    Args:
        shape: shape of the model.
        training: the settings, which decide what is trained.
        lengths: int64 [documents], tokens of each, at least one document.
        num_targets: tokens in the loss, over all documents.
    """
    num_tokens = int(lengths.sum())
    seen = np.minimum(lengths, shape.sliding_window or lengths)
    keys = float((lengths * (lengths + 1) / 2).sum()) / num_tokens
    in_window = float((seen * (lengths - (seen - 1) / 2)).sum()) / num_tokens
    return num_tokens * token_flops(shape, training, keys, in_window, num_targets / num_tokens).total


@dataclass(frozen=True)
class MfuMeter:
    """Measures MFU.

    Attributes:
        peak_flops: FLOP/s of all GPUs; None if the GPU is unknown, or the model's FLOPs are an estimate.
    """

    recipe: RecipePlan
    peak_flops: float | None

    @classmethod
    def of(cls, recipe: RecipePlan, world: World) -> MfuMeter:
        """Return the meter of a run on these processes."""
        is_known = world.device.type == "cuda" and count_model(recipe.model.architecture).is_exact
        gpu = gpu_of_device(torch.cuda.get_device_name(world.device)) if is_known else None
        return cls(recipe, None if gpu is None else world.size * gpu.peak_flops(recipe.training.compute_precision))

    def mfu(self, lengths: NDArray[np.int64], num_targets: int, seconds: float) -> float | None:
        """Return MFU from 0 to 1, of documents that were trained on in this time; None without a known peak."""
        if self.peak_flops is None:
            return None
        recipe = self.recipe
        return count_flops(recipe.model.architecture, recipe.training, lengths, num_targets) / seconds / self.peak_flops
