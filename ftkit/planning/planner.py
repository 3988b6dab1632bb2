"""Make a plan from recipe, cluster, image and request.

`plan_run` is pure: it does no I/O.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ftkit.config.execution import method_counts
from ftkit.config.image_reference import ImageFile, NamedImage, RegistryImage
from ftkit.config.recipe import RecipePlan
from ftkit.errors import ConfigError, Problem, one_line
from ftkit.models.adapters import default_targets
from ftkit.models.config_json import resolve_shape
from ftkit.models.parameters import count_by_config, count_model
from ftkit.models.spec import ArchitecturePlan, ModelPlan
from ftkit.planning.checks import find_problems
from ftkit.planning.choices import (
    choose_engine,
    choose_execution,
    least_memory,
    with_sharding,
)
from ftkit.planning.fit import fit
from ftkit.planning.job import PlacementPlan
from ftkit.planning.layout import Workspace
from ftkit.planning.notes import (
    LINEAR_KERNELS,
    notes_on_fit,
    notes_on_fp8,
    notes_on_linear_attention,
    notes_on_model,
    notes_on_packs,
)
from ftkit.planning.plan import PREPARATION_VERSION, BatchPlan, RunPlan, setup_of
from ftkit.planning.step_time import PADDING, predict_step_time
from ftkit.planning.training_checks import why_undivided

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from pathlib import Path

    from ftkit.config.cluster import ClusterProfile
    from ftkit.config.image import ImageSpec
    from ftkit.config.image_reference import AnyImage
    from ftkit.config.recipe import RecipeSpec
    from ftkit.config.request import RunRequest
    from ftkit.config.training import TrainingSpec
    from ftkit.models.spec import ModelCounts, ModelSpec
    from ftkit.planning.training_setup import Setup


def plan_run(
    recipe: RecipeSpec, cluster: ClusterProfile, image: ImageSpec | None, request: RunRequest, *, ftkit_version: str
) -> RunPlan:
    """Resolve recipe, cluster, image and request into a plan.

    Raises:
        ConfigError: with every reason why the combination is impossible.
    """
    num_nodes = request.num_nodes or recipe.resources.num_nodes
    per_node = request.gpus_per_node or recipe.resources.gpus_per_node or cluster.gpus_per_node
    model = request.model or plan_model(recipe.model, None)
    shape = model.architecture
    training = recipe.training.with_targets(default_targets(shape))
    recipe = recipe.model_copy(update={"training": training})
    problems = find_problems(recipe, model, cluster, image, request, num_nodes, per_node)
    if problems:
        raise ConfigError(problems)
    job = plan_job(cluster, request, request.name or recipe.name, num_nodes, per_node)
    placement = job["placement"]
    engine = choose_engine(shape, training, placement.world_size, cluster.gpu)
    trained_in = None if cluster.runtime == "none" else image
    lightest = replace(
        setup_of(shape, least_memory(training), engine.name, cluster, placement),
        has_linear_kernel=trained_in is None or LINEAR_KERNELS in trained_in.listed_packages,
    )
    can_divide = recipe.data.packing != "off" and not why_undivided(training, cluster, image)
    chosen, execution = choose_execution(training, lightest)
    setup = with_sharding(replace(lightest, training=chosen))
    padding = (request.padding or PADDING) if recipe.data.packing == "off" else 1.0
    fill, num_steps = _fill_ratio(chosen, request), count_steps(chosen, request.num_packs)
    planned, predicted = RecipePlan.of(recipe, model, chosen), fit(setup)
    return RunPlan(
        **job,
        ftkit_version=ftkit_version,
        fingerprint=fingerprint(recipe, model, request.data_stamp),
        recipe=planned,
        engine=engine.of(setup),
        batch=_batch(setup),
        memory=predicted.memory,
        speed=None if setup.gpu is None else predict_step_time(setup, setup.gpu, padding, fill or 1.0),
        num_parameters=count_model(shape).total,
        num_trained=method_counts(shape, chosen).trained,
        num_steps=num_steps,
        fill_ratio=fill,
        num_tokens=_count_tokens(chosen, num_steps, request),
        notes=(
            *notes_on_packs(chosen, request.num_packs),
            *notes_on_fit(setup, cluster, predicted.memory, can_divide_packs=can_divide),
            *notes_on_fp8(setup, trained_in),
            *notes_on_linear_attention(setup, trained_in, padding),
            *notes_on_model(recipe, model, cluster, image, request.padding),
        ),
        execution=execution,
        host_memory=predicted.host_memory,
    )


def plan_model(model: ModelSpec, config: Mapping[str, Any] | None, counts: ModelCounts | None = None) -> ModelPlan:
    """Resolve a model to its complete shape, with its parameter counts.

    Args:
        model: the recipe's model.
        config: raw configuration of its weights; None if there is none, or if it can't be read from here.
        counts: parameters counted on the model class; None if they follow from the configuration or the shape.

    Raises:
        ConfigError: the recipe contradicts the configuration, or neither defines the complete shape.
    """
    shape = resolve_shape(model, config)
    if counts is None and config is not None:
        try:
            counts = count_by_config(config)
        except (LookupError, TypeError, ValueError) as error:
            what = f"parameters can't be counted from its values ({type(error).__name__}: {one_line(error)})."
            fix = "Correct the file, or copy or download it again."
            raise ConfigError([Problem(f"config.json of {model.weights}", "model.weights", what, fix)]) from error
    return ModelPlan.of(model, shape, counts or count_model(shape))


def plan_for_counts(plan: RunPlan, counts: ModelCounts) -> RunPlan:
    """Return the plan updated with the parameter counts of the real model.

    Plans from estimates reshard all layers; with the counts, this is decided again, and memory is predicted again.
    Micro-batch, checkpointing and replicas stay as planned.
    """
    shape = plan.recipe.model.architecture
    if shape.is_measured:
        return plan
    counted = ArchitecturePlan.of(shape, counts)
    planned, training = replace(plan.setup, shape=counted), plan.recipe.training
    setup = with_sharding(planned.with_training(shard_degree=planned.num_shards))
    return replace(
        plan,
        recipe=RecipePlan.of(plan.recipe, ModelPlan.of(plan.recipe.model, counted, counts), training),
        engine=replace(plan.engine, keeps_weights=setup.keeps_weights, defers_sync=setup.defers_sync),
        memory=fit(setup).memory,
        host_memory=fit(setup).host_memory,
        num_parameters=counts.total,
        num_trained=method_counts(counted, training).trained,
    )


def fingerprint(recipe: RecipeSpec, model: ModelPlan, data_stamp: str) -> str:
    """Return the name of the prepared data, which depends on all inputs that determine the packs."""
    parts = (
        str(PREPARATION_VERSION),
        recipe.data.model_dump_json(
            exclude={"packing": True, "task": {"file"}}
        ),  # documents are packed on disk either way
        model.tokenizer.model_dump_json(),
        f"{model.weights}@{recipe.model.revision}" if model.tokenizer.source == "model" else "",
        *model.added_tokens,
        str(recipe.training.sequence_length),
        str(model.architecture.vocab_size),  # the upper limit of token ids
        data_stamp,
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def count_steps(training: TrainingSpec, num_packs: int | None) -> int | None:
    """Return the number of optimizer steps; None while it depends on unprepared data."""
    if training.max_steps is not None:
        return training.max_steps
    if num_packs is None or training.num_epochs is None:
        return None
    return -(-num_packs * training.num_epochs // training.global_batch_size)


def _fill_ratio(training: TrainingSpec, request: RunRequest) -> float | None:
    """Return the fraction of the prepared packs that is not padding; None if there are none yet."""
    if not request.num_packs or request.num_tokens is None:
        return None
    return request.num_tokens / (request.num_packs * training.sequence_length)


def _count_tokens(training: TrainingSpec, num_steps: int | None, request: RunRequest) -> int | None:
    """Return the tokens of the documents of all steps; an epoch's last step may have fewer packs than the others."""
    if num_steps is None or not request.num_packs or request.num_tokens is None:
        return None
    num_packs = num_steps * training.global_batch_size
    if training.max_steps is None and training.num_epochs is not None:
        num_packs = training.num_epochs * request.num_packs
    return round(num_packs * request.num_tokens / request.num_packs)


def container_image(cluster: ClusterProfile, image: AnyImage | None, workspace: Path) -> str | None:
    """Return the image in the runtime's form: a path, the docker engine's name, or an address."""
    if cluster.runtime == "none" or image is None:
        return None
    match image:
        case RegistryImage() as remote:
            uris = {"docker": remote.pinned, "apptainer": remote.docker_uri}
            return uris.get(cluster.runtime, remote.enroot_uri)
        case ImageFile(path):
            return str(path)
        case NamedImage() as named if cluster.runtime == "docker":
            return named.docker_name
        case NamedImage() as named:
            return str(Workspace(workspace).image_file(named, cluster.image_format))


class JobFields(TypedDict):
    """The fields of a `JobPlan` that follow from cluster and request."""

    version: Literal[2]
    id: str
    name: str
    created: datetime
    workspace: Path
    cluster: ClusterProfile
    placement: PlacementPlan
    image: str | None
    container_image: str | None
    python: str


def plan_job(cluster: ClusterProfile, request: RunRequest, name: str, num_nodes: int, per_node: int) -> JobFields:
    """Return the fields that every kind of plan takes from cluster and request."""
    has_container = cluster.runtime != "none"
    return {
        "version": 2,
        "id": f"{name}-{request.created:%Y%m%dT%H%M%SZ}-{request.suffix}",
        "name": name,
        "created": request.created,
        "workspace": request.workspace,
        "cluster": cluster,
        "placement": _placement(cluster, num_nodes, per_node),
        "image": str(request.image) if request.image and has_container else None,
        "container_image": container_image(cluster, request.image, request.workspace),
        "python": "python3" if has_container else request.python,
    }


def _placement(cluster: ClusterProfile, num_nodes: int, per_node: int) -> PlacementPlan:
    """Return the placement of the processes, with the threads of each."""
    if cluster.device == "auto":
        raise AssertionError("device 'auto' is resolved before a run is planned")
    threads = max(1, (cluster.cpus_per_node or per_node) // per_node)
    return PlacementPlan(num_nodes, per_node, cluster.device, threads)


def _batch(setup: Setup) -> BatchPlan:
    training = setup.training
    return BatchPlan(
        micro_batch_size=training.micro_batch_size,
        accumulation_steps=training.global_batch_size // (training.micro_batch_size * setup.num_data_ranks),
        global_batch_size=training.global_batch_size,
    )
