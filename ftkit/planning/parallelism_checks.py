"""The checks of how ranks divide packs, layers, and weights. Each yields all problems that it finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit.config.execution import indivisible_sizes
from ftkit.errors import Problem
from ftkit.models.families import MEASURED
from ftkit.planning.training_setup import GPUS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.config.cluster import ClusterProfile
    from ftkit.config.image import ImageSpec
    from ftkit.config.recipe import RecipeSpec
    from ftkit.config.training import TrainingSpec
    from ftkit.models.spec import ArchitecturePlan


_FLASH4 = "flash-attn-4"


def why_undivided(training: TrainingSpec, cluster: ClusterProfile, image: ImageSpec | None) -> str:
    """Return why no attention kernel can divide packs among GPUs; empty if none is known to be missing."""
    gpu = GPUS[cluster.gpu] if cluster.gpu else None
    if training.attention == "sdpa" or cluster.device == "cpu":
        return ""
    if gpu is not None and not gpu.runs_flash4(training):
        return f"which this recipe can't use on {gpu.device_name}"
    if image is not None and cluster.runtime != "none" and _FLASH4 not in image.listed_packages:
        return f"which {image.reference} does not list"
    return ""


def check_context_parallel(
    recipe: RecipeSpec, shape: ArchitecturePlan, per_node: int, cluster: ClusterProfile, image: ImageSpec | None
) -> Iterator[Problem]:
    heads = shape.num_attention_heads
    if recipe.training.context_parallel == 1:
        return
    where, key, size = f"recipe {recipe.name}", "training.context_parallel", recipe.training.gpus_per_pack
    yield from _groups(recipe, key, size, per_node)
    if reason := why_undivided(recipe.training, cluster, image):
        yield Problem(
            where, key, f"needs {_FLASH4}, {reason}.",
            "Use an image with it ('ftkit images') on Hopper or newer, in bf16; or training.attention=sdpa.",
        )  # fmt: skip
    if heads % size:
        with_parts_of_layers = " for the product with tensor_parallel" * (recipe.training.tensor_parallel > 1)
        yield Problem(
            where, key, f"{heads} attention heads of the model can't be divided among {size} GPUs.",
            f"Use a divisor of {heads}{with_parts_of_layers}.",
        )  # fmt: skip


def check_tensor_parallel(recipe: RecipeSpec, shape: ArchitecturePlan, per_node: int) -> Iterator[Problem]:
    size = recipe.training.tensor_parallel
    if size == 1:
        return
    where, key = f"recipe {recipe.name}", "training.tensor_parallel"
    yield from _groups(recipe, key, size, per_node)
    if shape.family not in MEASURED:
        yield Problem(
            where, key, f"the layers of a '{shape.family}' can't be divided, only those of {', '.join(MEASURED)}.",
            "Leave it out.",
        )  # fmt: skip
        return
    sizes = (shape.num_attention_heads, shape.num_key_value_heads, shape.intermediate_size)
    for name, number in indivisible_sizes(*sizes, size).items():
        yield Problem(
            where, key, f"{number:,} {name} can't be divided among {size} GPUs.", f"Use a divisor of {number:,}."
        )
    if recipe.evaluation.completions is not None:
        yield Problem(
            where, key, "a divided model computes losses, but can't generate completions for the evaluation.",
            "Set evaluation.generation and evaluation.sql_execution to null, and use 'ftkit eval' after training.",
        )  # fmt: skip


def _groups(recipe: RecipeSpec, key: str, size: int, per_node: int) -> Iterator[Problem]:
    """Yield the problems of groups of GPUs that divide packs."""
    where = f"recipe {recipe.name}"
    if per_node % size:
        yield Problem(
            where, key, f"{per_node} GPUs of a node can't be divided into groups of {size}.",
            f"Use a divisor of {per_node}, or another --gpus-per-node.",
        )  # fmt: skip
    if recipe.data.packing == "off":
        yield Problem(where, key, "divides the tokens of packs, and data.packing is 'off'.", "Use data.packing 'auto'.")


def check_shard_degree(recipe: RecipeSpec, world_size: int) -> Iterator[Problem]:
    degree = recipe.training.shard_degree
    if degree != "auto" and world_size % degree:
        yield Problem(
            f"recipe {recipe.name}", "training.shard_degree",
            f"{world_size} GPUs can't be divided into groups of {degree}.",
            f"Use 'auto', or a divisor of {world_size}.",
        )  # fmt: skip
