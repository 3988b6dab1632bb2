"""Checks of settings about FP8: that GPUs and layers have it, and that none of them is without effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit.config.execution import FP8_MULTIPLE, ROUTERS
from ftkit.errors import Problem
from ftkit.models.parameters import count_model
from ftkit.planning.training_setup import GPUS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.config.cluster import ClusterProfile
    from ftkit.config.recipe import RecipeSpec
    from ftkit.models.spec import ArchitecturePlan


def check_fp8(recipe: RecipeSpec, shape: ArchitecturePlan, cluster: ClusterProfile) -> Iterator[Problem]:
    """Yield the problems of a recipe's FP8 settings."""
    training, where = recipe.training, f"recipe {recipe.name} on cluster {cluster.name}"
    if not training.fp8_all_gather and training.precision != "fp8":
        yield Problem(
            where, "training.fp8_all_gather",
            f"has no effect with precision '{training.precision}': only 'fp8' all-gathers in FP8.", "Leave it out.",
        )  # fmt: skip
    if not training.multiplies_in_fp8:
        return
    key = "precision" if training.trains_in_fp8 else "base_precision"
    if cluster.gpu is not None and not GPUS[cluster.gpu].has_fp8:
        yield Problem(
            where, f"training.{key}", f"{GPUS[cluster.gpu].device_name} does not multiply in FP8; Ada, Hopper and "
            "newer GPUs do.", f"Leave training.{key} out.",
        )  # fmt: skip
    if not _has_multiples(recipe, shape):
        yield Problem(
            where, f"training.{key}", f"has no effect on this model: no linear layer of its decoder layers has inputs "
            f"and outputs that are multiples of {FP8_MULTIPLE}, as FP8 needs.", f"Leave training.{key} out.",
        )  # fmt: skip


def _has_multiples(recipe: RecipeSpec, shape: ArchitecturePlan) -> bool:
    """Return whether a matrix would be multiplied in FP8; estimated counts may lack some."""
    counts = count_model(shape)
    sizes = [(each.inputs, each.outputs) for each in counts.linears if each.name not in ROUTERS]
    if not recipe.training.trains_in_fp8:  # trained experts are in bf16
        sizes += [(each.inputs, each.outputs) for each in counts.expert_matrices]
    return not counts.is_exact or any(inputs % FP8_MULTIPLE == outputs % FP8_MULTIPLE == 0 for inputs, outputs in sizes)
