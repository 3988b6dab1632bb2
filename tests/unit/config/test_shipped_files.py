"""Shipped files are valid, consistent with each other, and match their file names."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ftkit import assets
from ftkit.config.context import Context, list_images, list_names
from ftkit.config.image_reference import NamedImage
from ftkit.config.load import load_cluster, load_image, load_recipe, read_shipped, shipped_config
from ftkit.config.request import RunRequest
from ftkit.models.config_json import read_shape
from ftkit.models.parameters import count_by_config, count_model
from ftkit.planning.planner import plan_model, plan_run
from ftkit.planning.training_setup import GPUS

if TYPE_CHECKING:
    from ftkit.config.recipe import RecipeSpec
    from ftkit.models.architecture import ModelPlan
    from ftkit.planning.plan import RunPlan

SHIPPED_ONLY = Context(Path("/nonexistent"), Path("/nonexistent"), {})
RECIPES = list_names("recipe", SHIPPED_ONLY)
CLUSTERS = list_names("cluster", SHIPPED_ONLY)
IMAGES = list_images(SHIPPED_ONLY)
FOR_CONTAINERS = [name for name in RECIPES if load_recipe(name, SHIPPED_ONLY).image]

BILLIONS_OF_PARAMETERS = {
    "gemma4-26b-a4b": 25.23,
    "gemma4-31b": 30.70,
    "gpt-oss-120b": 116.83,
    "gpt-oss-20b": 20.91,
    "ministral3-8b": 8.49,
    "qwen3-30b-a3b": 30.53,
    "qwen3.5-35b-a3b": 34.66,
    "qwen3.5-9b": 8.95,
    "gemma3-12b": 11.77,
    "gemma3-1b": 1.00,
    "gemma3-4b": 3.88,
    "llama3-8b": 8.03,
    "llama3.3-70b": 70.55,
    "olmo3-32b": 32.23,
    "olmo3-7b": 7.30,
    "qwen3-8b": 8.19,
}
"""As published: by the model cards, and for Gemma's text parts by Keras Hub's presets."""


def shipped_model(recipe: RecipeSpec) -> ModelPlan:
    """Resolve the model of a shipped recipe without network."""
    return plan_model(recipe.model, shipped_config(recipe.model.weights))


def family_of(recipe: str) -> str:
    return shipped_model(load_recipe(recipe, SHIPPED_ONLY)).architecture.family


def test_every_kind_of_file_is_shipped() -> None:
    assert {"demo", "olmo3-7b-full"} <= set(RECIPES)
    assert {"local", "slurm", "a3-megagpu-8g", "a4-highgpu-8g", "soperator", "aws-p5"} <= set(CLUSTERS)
    assert {"olmo3:25.02", "gemma3:25.02", "llama3:25.02", "qwen3:25.02"} <= set(IMAGES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_matches_its_file_name(name: str) -> None:
    assert load_recipe(name, SHIPPED_ONLY).name == name


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_matches_its_file_name(name: str) -> None:
    assert load_cluster(name, SHIPPED_ONLY).name == name


@pytest.mark.parametrize("reference", IMAGES)
def test_an_image_matches_its_folder_name(reference: str) -> None:
    assert load_image(reference, SHIPPED_ONLY).reference == reference


@pytest.mark.parametrize("reference", IMAGES)
def test_an_image_supports_the_model_of_its_default_recipe(reference: str) -> None:
    image = load_image(reference, SHIPPED_ONLY)
    assert image.purpose == "serving" or family_of(image.default_recipe) in image.families


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipes_image_is_shipped_and_supports_its_model(name: str) -> None:
    recipe = load_recipe(name, SHIPPED_ONLY)
    if recipe.image is not None:
        assert family_of(name) in load_image(recipe.image, SHIPPED_ONLY).families


@pytest.mark.parametrize("path", sorted(assets.ARCHITECTURES.glob("*.yaml")), ids=lambda path: path.stem)
def test_an_architecture_has_the_param_count_of_its_model(path: Path) -> None:
    config, models = read_shipped(path)
    assert models
    assert all(shipped_config(weights) == config for weights in models)
    assert count_by_config(config).is_exact
    assert round(count_by_config(config).total / 1e9, 2) == BILLIONS_OF_PARAMETERS[path.stem]


@pytest.mark.parametrize("name", ["gpt-oss-120b", "gpt-oss-20b", "qwen3-30b-a3b"])
def test_a_mixture_without_weights_has_the_experts_of_its_architecture(name: str) -> None:
    config, _ = read_shipped(assets.ARCHITECTURES / f"{name}.yaml")
    assert round(count_model(read_shape(config, name)).total / 1e9, 2) == BILLIONS_OF_PARAMETERS[name]


def _plan(recipe_name: str, cluster_name: str, num_nodes: int | None) -> RunPlan:
    recipe = load_recipe(recipe_name, SHIPPED_ONLY)
    assert recipe.image is not None
    request = RunRequest(
        name=None,
        num_nodes=num_nodes,
        gpus_per_node=None,
        image=NamedImage(recipe.image),
        image_is_explicit=False,
        workspace=Path("/shared/ftkit"),
        model=shipped_model(recipe),
        python="/opt/ftkit/bin/python3",
        created=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        suffix="4f2a",
    )
    cluster, image = load_cluster(cluster_name, SHIPPED_ONLY), load_image(recipe.image, SHIPPED_ONLY)
    return plan_run(recipe, cluster, image, request)


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("name", FOR_CONTAINERS)
def test_a_recipe_for_gpus_can_be_planned_on_8_and_16(name: str, num_nodes: int) -> None:
    per_node = load_recipe(name, SHIPPED_ONLY).resources.gpus_per_node or 8
    assert _plan(name, "slurm", num_nodes).placement.world_size == per_node * num_nodes


@pytest.mark.parametrize("name", FOR_CONTAINERS)
def test_a_recipe_fits_80_gb_gpus_on_its_number_of_nodes(name: str) -> None:
    assert _plan(name, "a3-megagpu-8g", None).memory.total <= GPUS["h100-80gb"].usable_gib
