"""The checks that need more than one spec. Each yields all problems that it finds."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from ftkit.config.cluster import ClusterProfile, mounted_folders
from ftkit.config.data import CHAT_TEMPLATES
from ftkit.config.evaluation import SCORES
from ftkit.config.recipe import SINK_PACKAGES, RecipeSpec, sinks_without_package
from ftkit.errors import Problem, plural
from ftkit.planning.job_checks import check_image, check_mounts, check_placement, check_time_limit, image_origin
from ftkit.planning.training_checks import check_training, problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ftkit.config.evaluation import GenerationSpec
    from ftkit.config.image import ImageSpec
    from ftkit.config.request import RunRequest
    from ftkit.models.spec import ArchitecturePlan, ModelPlan


def find_problems(  # noqa: PLR0913, PLR0917 - the inputs of a run
    recipe: RecipeSpec,
    model: ModelPlan,
    cluster: ClusterProfile,
    image: ImageSpec | None,
    request: RunRequest,
    num_nodes: int,
    processes_per_node: int,
) -> list[Problem]:
    """Return all reasons why this combination is impossible, each with the location of its key."""
    per_node, world_size = processes_per_node, num_nodes * processes_per_node
    folders = mounted_folders(recipe, cluster, request.workspace, num_nodes)
    owned = ((_owner(key, recipe, cluster), key, folder) for key, folder in folders)
    of_recipe = (
        *check_training(recipe, model, cluster, image, num_nodes, per_node),
        *_lengths(recipe, model.architecture),
        *_data(recipe),
        *_evaluation(recipe),
        *_profile(recipe, world_size),
        *_sinks(recipe, cluster, image),
    )
    problems = [
        *check_placement(cluster, request, num_nodes, per_node, recipe.resources.spare_nodes),
        *check_time_limit(cluster, recipe.resources.time_limit),
        *_in_recipe(recipe, of_recipe),
        *check_image(cluster, request),
        *_family_of_image(model.architecture, cluster, image, request),
        *check_mounts(cluster, request.workspace, owned),
    ]
    return [request.origins.locate(each) for each in problems]


def find_data_problems(recipe: RecipeSpec, shape: ArchitecturePlan) -> list[Problem]:
    """Return all reasons why the recipe's data can't be used with its model, wherever it is trained."""
    return list(_in_recipe(recipe, (*_lengths(recipe, shape), *_data(recipe))))


def _in_recipe(recipe: RecipeSpec, problems: Iterable[Problem]) -> Iterator[Problem]:
    return (replace(each, where=f"recipe {recipe.name}") for each in problems)


def _owner(key: str, recipe: RecipeSpec, cluster: ClusterProfile) -> str:
    """Return the spec that a key belongs to, for a key whose file is unknown."""
    first = key.partition(".")[0]
    if first in ClusterProfile.model_fields:
        return f"cluster {cluster.name}"
    return f"recipe {recipe.name}" if first in RecipeSpec.model_fields else "settings"


def _lengths(recipe: RecipeSpec, shape: ArchitecturePlan) -> Iterator[Problem]:
    if recipe.training.sequence_length > shape.max_position_embeddings:
        yield problem(
            "training.sequence_length",
            f"{recipe.training.sequence_length} is longer than the model's {shape.max_position_embeddings} positions.",
            f"Use a shorter one, or {_more_positions(recipe, shape)}.",
        )  # fmt: skip
    vocabulary = recipe.model.tokenizer.vocab_size
    if vocabulary is not None and vocabulary > shape.vocab_size:
        yield problem(
            "model.tokenizer.vocab_size",
            f"{vocabulary} tokens don't fit the model's embedding of {shape.vocab_size} rows.",
            "Make model.architecture.vocab_size at least as large.",
        )  # fmt: skip


def _more_positions(recipe: RecipeSpec, shape: ArchitecturePlan) -> str:
    """Return how to get positions for the recipe's sequence length."""
    length, scaling = recipe.training.sequence_length, shape.rope_scaling
    if scaling is not None and scaling.original_max_position_embeddings:
        return f"set model.architecture.rope_scaling.factor={ceil(length / scaling.original_max_position_embeddings)}"
    if recipe.model.weights == "random":
        return f"set model.architecture.max_position_embeddings={length}"
    return (
        "a model made for longer contexts; or, unless its config.json scales the positions already, set, with training "
        "to adapt it, model.architecture.rope_scaling="
        f"'{{rope_type: yarn, factor: {ceil(length / shape.max_position_embeddings)}}}'"
    )


def _data(recipe: RecipeSpec) -> Iterator[Problem]:
    data = recipe.data
    if recipe.model.tokenizer.source == "trained" and data.chat_template not in CHAT_TEMPLATES:
        yield problem(
            "data.chat_template", "a tokenizer that ftkit trains needs a template that ftkit ships.",
            f"Use one of {', '.join(CHAT_TEMPLATES)}.",
        )  # fmt: skip
    if data.too_long == "split" and data.format.kind not in ("text", "auto"):
        yield problem(
            "data.too_long", "a conversation can't be split: its later parts would lack their context.",
            "Use 'truncate', which cuts after a turn that fits, or 'drop'.",
        )  # fmt: skip
    if data.train_on == "completion" and data.format.kind in ("messages", "text"):
        yield problem(
            "data.train_on", f"format '{data.format.kind}' has no prompts and completions.",
            "Use 'assistant', 'last' or 'all'.",
        )  # fmt: skip


def _profile(recipe: RecipeSpec, world_size: int) -> Iterator[Problem]:
    profile, max_steps = recipe.profile, recipe.training.max_steps
    if not profile.enabled:
        return
    absent = [str(rank) for rank in profile.ranks if rank >= world_size]
    if absent:
        yield problem(
            "profile.ranks",
            f"there is no rank {', '.join(absent)} in {plural(world_size, 'process')}, counted from 0.",
        )
    if max_steps is not None and profile.num_steps > max_steps:
        yield problem(
            "profile", f"takes {plural(profile.num_steps, 'step')}, the run has {max_steps}.",
            "Use fewer wait_steps, warmup_steps, active_steps or cycles.",
        )  # fmt: skip


def _family_of_image(
    shape: ArchitecturePlan, cluster: ClusterProfile, image: ImageSpec | None, request: RunRequest
) -> Iterator[Problem]:
    family = shape.family
    if image is not None and cluster.runtime != "none" and family not in image.families and shape.is_measured:
        where, key = image_origin(request)
        yield Problem(
            where, key, f"'{image.reference}' is made for {', '.join(image.families)}, not {family}.",
            "Use an image made for this family: ftkit images.",
        )  # fmt: skip


def _sinks(recipe: RecipeSpec, cluster: ClusterProfile, image: ImageSpec | None) -> Iterator[Problem]:
    if image is None or cluster.runtime == "none":
        return
    for sink in sinks_without_package(recipe.tracking.sinks, image.listed_packages):
        package = SINK_PACKAGES[sink][0]
        yield problem(
            "tracking.sinks", f"'{sink}' needs the package {package}, which "
            f"{image.reference} does not list.",
            f"Add it to 'packages:' of the image and lock it again (ftkit images lock {image.reference}); if its base "
            f"has it, list it under 'provided:'; or remove {sink}.",
        )  # fmt: skip


# --- Evaluation ------------------------------------------------------------------------------------


def _evaluation(recipe: RecipeSpec) -> Iterator[Problem]:
    """Yield the problems of a recipe's evaluation."""
    evaluation = recipe.evaluation
    no_split = "there is no validation split.", "Set data.validation, for example data.validation.count=200."
    if evaluation.every_steps is not None and not recipe.data.has_validation:
        yield problem("evaluation.every_steps", *no_split)
    generation = evaluation.generation
    if generation is not None:
        yield from _completions(recipe, generation, no_split)
    if evaluation.selection is not None:
        yield from _selection(recipe, evaluation.selection.metric, generation)


def _completions(recipe: RecipeSpec, generation: GenerationSpec, no_split: tuple[str, str]) -> Iterator[Problem]:
    key = "evaluation.generation"
    if recipe.data.format.kind == "text":
        yield problem(key, "plain text has no turns to complete.", "Omit it; every_steps measures the loss.")
    known = [*SCORES, *(recipe.data.task.metrics if recipe.data.task else [])]
    for name in generation.metrics:
        if name not in known:
            yield problem(f"{key}.metrics", f"there is no metric '{name}'.", f"Use one of {', '.join(known)}.")
    if not recipe.data.has_validation:
        yield problem(key, *no_split)


def _selection(recipe: RecipeSpec, metric: str, generation: GenerationSpec | None) -> Iterator[Problem]:
    """Check that each evaluation during training measures the metric that selects the best one."""
    key = "evaluation.best.metric"
    names = [source.name for source in recipe.data.sources]
    names = [f"{name}.{place}" if names.count(name) > 1 else name for place, name in enumerate(names)]
    losses = ["loss", "perplexity", *(f"loss/{name}" for name in names if len(names) > 1)]
    own = recipe.data.task.metrics if recipe.data.task else []
    chosen = [*SCORES, *own] if generation is None or not generation.metrics else generation.metrics
    scores = [score for name in chosen for score in SCORES.get(name, (name,))]
    if metric in losses:
        return
    if metric not in scores:
        yield problem(key, f"'{metric}' is not measured.", f"Use one of {', '.join([*losses, *scores])}.")
    elif generation is None or not generation.num_rows_during:
        yield problem(
            key, f"'{metric}' is not measured during training.",
            f"Set evaluation.generation, for example evaluation.generation.metrics=[{metric}].",
        )  # fmt: skip
