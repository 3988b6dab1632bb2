"""Find the reasons why a run is impossible: contradictions between recipe, model, cluster, image and folders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.config.cluster import ClusterProfile, format_time_limit, mounted_folders, parse_time_limit
from ftkit.config.data import CHAT_TEMPLATES
from ftkit.config.image_reference import ImageFile
from ftkit.config.layers import COMMAND_LINE
from ftkit.config.recipe import SCORES, SINK_PACKAGES, RecipeSpec, ResourcesSpec, sinks_without_package
from ftkit.errors import Problem, plural
from ftkit.planning.training_checks import RunInputs, check_training, problem

if TYPE_CHECKING:
    from ftkit.config.request import RunRequest
    from ftkit.models.architecture import ArchitecturePlan
    from ftkit.planning.plan import PlacementPlan


def find_problems(run: RunInputs) -> list[Problem]:
    """Return all reasons why a run of the trainer is impossible, each with the location of its key."""
    recipe, cluster, request, placement = run.recipe, run.cluster, run.request, run.placement
    folders = []
    for key, folder in mounted_folders(recipe, cluster, request.workspace, placement.num_nodes):
        owner, first = "settings", key.partition(".")[0]
        if first in ClusterProfile.model_fields:
            owner = f"cluster {cluster.name}"
        elif first in RecipeSpec.model_fields:
            owner = f"recipe {recipe.name}"
        folders.append((owner, key, folder))
    of_recipe = (*check_training(run), *_data(recipe, run.shape), *_evaluation(recipe), *_profile(run), *_sinks(run))
    problems = (
        *check_job(cluster, request, recipe.resources, placement),
        *(replace(each, where=f"recipe {recipe.name}") for each in of_recipe),
        *_family_of_image(run),
        *check_mounts(cluster, request.workspace, folders),
    )
    return [request.origins.locate(each) for each in problems]


def find_data_problems(recipe: RecipeSpec, shape: ArchitecturePlan) -> list[Problem]:
    """Return all reasons why the recipe's data can't be used with its model, wherever it is trained."""
    return [replace(each, where=f"recipe {recipe.name}") for each in _data(recipe, shape)]


# --- Every kind of job: nodes, GPUs, time, image, folders -------------------------------------------


def check_job(
    cluster: ClusterProfile, request: RunRequest, resources: ResourcesSpec, placement: PlacementPlan
) -> Iterator[Problem]:
    """Yield the reasons why the cluster can't start a job with these resources and this image."""
    num_nodes, per_node = placement.num_nodes, placement.processes_per_node
    spare, name = resources.spare_nodes, cluster.name
    where = COMMAND_LINE if request.num_nodes or request.gpus_per_node else f"cluster {name}"
    nodes = "resources.num_nodes" if request.num_nodes is None else "--nodes"
    gpus = "resources.gpus_per_node" if request.gpus_per_node is None else "--gpus-per-node"
    if num_nodes < 1 or per_node < 1:
        yield Problem(COMMAND_LINE, "--nodes, --gpus-per-node", "must be at least 1.")
    yield from _wrong_size_key(cluster, request, resources)
    if cluster.scheduler == "local" and num_nodes > 1:
        what = f"cluster '{name}' is a single machine, got {num_nodes} nodes."
        yield Problem(where, nodes, what, "Use --nodes 1, or a Slurm cluster with --cluster.")
    elif cluster.scheduler == "local" and spare:
        yield Problem(COMMAND_LINE, "resources.spare_nodes", f"cluster '{name}' is a single machine.", "Omit it.")
    elif cluster.max_nodes is not None and num_nodes + spare > cluster.max_nodes:
        requested = plural(num_nodes, "node") + (f" and {spare} spare" if spare else "")
        yield Problem(where, nodes, f"{requested} requested, the cluster has {cluster.max_nodes}.")
    if cluster.device == "cuda" and per_node > cluster.max_processes:
        what = f"{plural(per_node, 'GPU')} requested, a node has {cluster.max_processes}."
        yield Problem(where, gpus, what, f"Use at most {cluster.max_processes}, and more --nodes.")
    if cluster.scheduler == "local" and resources.sbatch_options:
        yield Problem(COMMAND_LINE, "resources.sbatch_options", f"cluster '{name}' has no Slurm.", "Omit them.")
    for conflict in cluster.find_conflicts(resources.sbatch_options):
        yield Problem(COMMAND_LINE, "resources.sbatch_options", f"has {conflict}.", "Omit it.")
    yield from _time_limit(cluster, resources.time_limit)
    yield from _image(cluster, request)


def _wrong_size_key(cluster: ClusterProfile, request: RunRequest, resources: ResourcesSpec) -> Iterator[Problem]:
    wrong, right, where = "gpus", "processes", "CPUs"
    if cluster.device == "cuda":
        wrong, right, where = "processes", "gpus", "GPUs, one process each"
    what = f"'{cluster.name}' trains on {where}."
    if getattr(request, f"{wrong}_per_node"):
        yield Problem(COMMAND_LINE, f"--{wrong}-per-node", what, f"Use --{right}-per-node.")
    if getattr(resources, f"{wrong}_per_node"):
        yield Problem("recipe", f"resources.{wrong}_per_node", what, f"Use resources.{right}_per_node.")


def _time_limit(cluster: ClusterProfile, wanted: str | None) -> Iterator[Problem]:
    """Check that Slurm doesn't send the stop signal as soon as a job starts: `--signal` may be up to a minute early."""
    limit = cluster.limit_time(wanted)
    seconds = parse_time_limit(limit) if limit else None
    shortest = cluster.stop_signal_seconds + 60
    if cluster.scheduler == "slurm" and cluster.stop_signal_seconds and seconds and seconds <= shortest:
        is_wanted = wanted is not None and limit == wanted
        yield Problem(
            COMMAND_LINE if is_wanted else f"cluster {cluster.name}",
            "resources.time_limit" if is_wanted else "time_limit",
            f"{limit} is too short: Slurm asks the job to stop {cluster.stop_signal_seconds} s before its end "
            "(stop_signal_seconds in the profile), or a minute earlier, so it would never train for long.",
            f"Use more than {format_time_limit(shortest)}.",
        )


def _image(cluster: ClusterProfile, request: RunRequest) -> Iterator[Problem]:
    where, key = (COMMAND_LINE, "--image") if request.image_is_explicit else ("", "image")
    runtime, image = cluster.runtime, request.image
    if runtime == "none" and request.image_is_explicit:
        fix = "Omit --image, or use a cluster whose profile has another runtime."
        what = f"cluster '{cluster.name}' has runtime 'none': the image would have no effect."
        yield Problem(where, key, what, fix)
    if runtime != "none" and image is None:
        what = f"'{runtime}' needs an image, and none is set."
        fix = "Give --image NAME:TAG, or set 'image:' in ftkit.yaml."
        yield Problem(f"cluster {cluster.name}", "runtime", what, fix)
    if runtime == "docker" and isinstance(image, ImageFile):
        yield Problem(where, key, f"docker can't run a file: {image}.", "Use NAME:TAG, built by ftkit build.")
    if runtime == "pyxis" and isinstance(image, ImageFile) and image.path.suffix == ".sif":
        fix = "Use a .sqsh file ('ftkit import' makes one), or a cluster whose profile has runtime 'apptainer'."
        yield Problem(where, key, f"pyxis can't run a SIF file: {image}.", fix)


def check_mounts(
    cluster: ClusterProfile, workspace: Path, folders: Iterable[tuple[str, str, str]]
) -> Iterator[Problem]:
    """Yield the reasons why a job can't mount these folders, given as (spec of the key, key, path)."""

    def has_control_characters(path: str) -> bool:
        return any(ord(character) < ord(" ") for character in path)

    if has_control_characters(str(workspace)):
        yield Problem("settings", "workspace", f"a path can't contain control characters: {str(workspace)!r}.")
    if cluster.runtime == "none":
        return
    for owner, key, folder in folders:
        if "," in folder or ":" in folder:
            what = f"{cluster.runtime} can't mount a path with a comma or a colon: {folder}."
            yield Problem(owner, key, what, "Use another folder, or a symbolic link without them.")
        if has_control_characters(folder) and key != "workspace":
            yield Problem(owner, key, f"{cluster.runtime} can't mount a path with control characters: {folder!r}.")
    for mount in cluster.mounts:
        if "," in mount or not all(part.startswith("/") for part in mount.split(":")[:2]):
            what = f"not an absolute PATH or FROM:TO without commas: {mount!r}."
            yield Problem(f"cluster {cluster.name}", "mounts", what)


# --- The recipe's data, profiler, trackers and image ------------------------------------------------


def _data(recipe: RecipeSpec, shape: ArchitecturePlan) -> Iterator[Problem]:
    data, length, vocabulary = recipe.data, recipe.training.sequence_length, recipe.model.tokenizer.vocab_size
    positions, scaling = shape.max_position_embeddings, shape.rope_scaling
    if length > positions:
        if scaling is not None and scaling.original_max_position_embeddings:
            factor = ceil(length / scaling.original_max_position_embeddings)
            more = f"set model.architecture.rope_scaling.factor={factor}"
        elif recipe.model.weights == "random":
            more = f"set model.architecture.max_position_embeddings={length}"
        else:
            more = (
                "a model made for longer contexts; or, unless its config.json scales the positions already, set, with "
                "training to adapt it, model.architecture.rope_scaling="
                f"'{{rope_type: yarn, factor: {ceil(length / positions)}}}'"
            )
        what = f"{length} is longer than the model's {positions} positions."
        yield problem("training.sequence_length", what, f"Use a shorter one, or {more}.")
    if vocabulary is not None and vocabulary > shape.vocab_size:
        what = f"{vocabulary} tokens don't fit the model's embedding of {shape.vocab_size} rows."
        yield problem("model.tokenizer.vocab_size", what, "Make model.architecture.vocab_size at least as large.")
    if recipe.model.tokenizer.source == "trained" and data.chat_template not in CHAT_TEMPLATES:
        what = "a tokenizer that ftkit trains needs a template that ftkit ships."
        yield problem("data.chat_template", what, f"Use one of {', '.join(CHAT_TEMPLATES)}.")
    if data.too_long == "split" and data.format.kind not in ("text", "auto"):
        what = "a conversation can't be split: its later parts would lack their context."
        yield problem("data.too_long", what, "Use 'truncate', which cuts after a turn that fits, or 'drop'.")
    if data.train_on == "completion" and data.format.kind in ("messages", "text"):
        what = f"format '{data.format.kind}' has no prompts and completions."
        yield problem("data.train_on", what, "Use 'assistant', 'last' or 'all'.")


def _profile(run: RunInputs) -> Iterator[Problem]:
    profile, max_steps, world_size = run.recipe.profile, run.training.max_steps, run.placement.world_size
    absent = [str(rank) for rank in profile.ranks if rank >= world_size]
    if profile.enabled and absent:
        what = f"there is no rank {', '.join(absent)} in {plural(world_size, 'process')}, counted from 0."
        yield problem("profile.ranks", what)
    if profile.enabled and max_steps is not None and profile.num_steps > max_steps:
        what = f"takes {plural(profile.num_steps, 'step')}, the run has {max_steps}."
        yield problem("profile", what, "Use fewer wait_steps, warmup_steps, active_steps or cycles.")


def _family_of_image(run: RunInputs) -> Iterator[Problem]:
    image, shape = run.image, run.shape
    if image is None or run.cluster.runtime == "none" or shape.family in image.families or not shape.is_measured:
        return
    what = f"'{image.reference}' is made for {', '.join(image.families)}, not {shape.family}."
    where, key = (COMMAND_LINE, "--image") if run.request.image_is_explicit else ("", "image")
    yield Problem(where, key, what, "Use an image made for this family: ftkit images.")


def _sinks(run: RunInputs) -> Iterator[Problem]:
    image = run.image
    if image is None or run.cluster.runtime == "none":
        return
    for sink in sinks_without_package(run.recipe.tracking.sinks, image.listed_packages):
        yield problem(
            "tracking.sinks",
            f"'{sink}' needs the package {SINK_PACKAGES[sink][0]}, which {image.reference} does not list.",
            f"Add it to 'packages:' of the image and lock it again (ftkit images lock {image.reference}); if its base "
            f"has it, list it under 'provided:'; or remove {sink}.",
        )


# --- Evaluation ------------------------------------------------------------------------------------


def _evaluation(recipe: RecipeSpec) -> Iterator[Problem]:
    evaluation, generation, task = recipe.evaluation, recipe.evaluation.generation, recipe.data.task
    no_split = "there is no validation split.", "Set data.validation, for example data.validation.count=200."
    known = [*SCORES, *(task.metrics if task else [])]
    if evaluation.every_steps is not None and not recipe.data.has_validation:
        yield problem("evaluation.every_steps", *no_split)
    if generation is not None:
        key = "evaluation.generation"
        if recipe.data.format.kind == "text":
            yield problem(key, "plain text has no turns to complete.", "Omit it; every_steps measures the loss.")
        for name in generation.metrics:
            if name not in known:
                yield problem(f"{key}.metrics", f"there is no metric '{name}'.", f"Use one of {', '.join(known)}.")
        if not recipe.data.has_validation:
            yield problem(key, *no_split)
    if evaluation.selection is not None:
        chosen = known if generation is None or not generation.metrics else generation.metrics
        yield from _selection(recipe, evaluation.selection.metric, chosen)


def _selection(recipe: RecipeSpec, metric: str, chosen: Sequence[str]) -> Iterator[Problem]:
    """Check that each evaluation during training measures the metric that selects the best checkpoint."""
    key, generation = "evaluation.best.metric", recipe.evaluation.generation
    losses = ["loss", "perplexity", *(f"loss/{name}" for name in recipe.data.validation_sources)]
    scores = [score for name in chosen for score in SCORES.get(name, (name,))]
    losses += recipe.training.metric_names
    if metric in losses:
        return
    if metric not in scores:
        yield problem(key, f"'{metric}' is not measured.", f"Use one of {', '.join([*losses, *scores])}.")
    elif generation is None or not generation.num_rows_during:
        fix = f"Set evaluation.generation, for example evaluation.generation.metrics=[{metric}]."
        yield problem(key, f"'{metric}' is not measured during training.", fix)
