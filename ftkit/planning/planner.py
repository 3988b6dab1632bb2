"""Make a plan from recipe, cluster, image and request. `plan_run` and `plan_script` are pure: they do no I/O."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftkit import __version__
from ftkit.config.cluster import ClusterProfile, site_folders
from ftkit.config.execution import FP8_MULTIPLE, GROUPED_MULTIPLE, method_counts, quantized_experts
from ftkit.config.image_reference import AnyImage, ImageFile, NamedImage, RegistryImage
from ftkit.config.layers import COMMAND_LINE
from ftkit.config.recipe import RecipePlan, RecipeSpec, ResourcesSpec, shares_prompts
from ftkit.errors import ConfigError, Problem, one_line, plural
from ftkit.models.adapters import default_targets
from ftkit.models.architecture import ArchitecturePlan, CountSource, ModelCounts, ModelPlan, ModelSpec
from ftkit.models.config_json import resolve_shape
from ftkit.models.families import MEASURED, UNPACKED, family_of
from ftkit.models.parameters import count_by_config, count_model
from ftkit.planning.choices import choose_engine, choose_execution, least_memory, with_sharding
from ftkit.planning.compatibility import check_job, check_mounts, find_problems
from ftkit.planning.fit import Fit
from ftkit.planning.flops import has_linear_attention
from ftkit.planning.layout import Workspace
from ftkit.planning.plan import (
    PREPARATION_VERSION,
    BatchPlan,
    CodePlan,
    PlacementPlan,
    RunPlan,
    Script,
    ScriptPlan,
    setup_of,
)
from ftkit.planning.step_time import PADDING, predict_step_time, replays_graphs
from ftkit.planning.suggestions import (
    notes_on_forwards,
    notes_on_pictures,
    notes_on_settings,
    suggest_changes,
    suggest_faster,
)
from ftkit.planning.training_checks import RunInputs
from ftkit.planning.training_setup import GPUS, Setup

if TYPE_CHECKING:
    from ftkit.config.image import ImageSpec
    from ftkit.config.request import RunRequest
    from ftkit.config.training import TrainingSpec


LINEAR_KERNELS = "flash-linear-attention"  # the package with kernels for linear attention


def plan_run(recipe: RecipeSpec, cluster: ClusterProfile, image: ImageSpec | None, request: RunRequest) -> RunPlan:
    """Resolve recipe, cluster, image and request into a plan. Raises `ConfigError` with every problem found."""
    model = request.model or plan_model(recipe.model, None)
    shape = model.architecture
    recipe = recipe.model_copy(update={"training": recipe.training.with_targets(default_targets(shape))})
    job = _plan_job(cluster, request, recipe.resources, recipe.name)
    training, placement = recipe.training, job["placement"]
    run = RunInputs(recipe, model, cluster, image, request, placement)
    if problems := find_problems(run):
        raise ConfigError(problems)
    engine = choose_engine(shape, training, placement.world_size, cluster.gpu, has_pictures=bool(recipe.data.pictures))
    trained_in = None if cluster.runtime == "none" else image
    lightest = replace(
        setup_of(shape, least_memory(training), engine.name, cluster, placement, recipe.data),
        has_linear_kernel=trained_in is None or LINEAR_KERNELS in trained_in.listed_packages,
        teacher=request.teacher.architecture if request.teacher else None,
    )
    chosen, execution = choose_execution(training, lightest)
    setup = with_sharding(replace(lightest, training=chosen))
    padding = (request.padding or PADDING) if recipe.data.packing == "off" else 1.0
    num_steps, num_packs = count_steps(chosen, request.num_packs), request.num_packs
    fill, num_tokens = None, None
    if num_packs and request.num_tokens is not None:
        fill = request.num_tokens / (num_packs * chosen.sequence_length)
        if num_steps is not None:
            trained_packs = num_steps * chosen.global_batch_size
            if chosen.max_steps is None and chosen.num_epochs is not None:  # an epoch's last step may have fewer packs
                trained_packs = packs_of_epochs(chosen.num_epochs, num_packs)
            num_tokens = round(trained_packs * request.num_tokens / num_packs)
    predicted = Fit(setup)
    return RunPlan(
        **job,
        fingerprint=fingerprint(recipe, model, request.data_stamp),
        recipe=RecipePlan.extend(recipe, model=model, training=chosen, teacher=request.teacher),
        engine=engine.resolved(setup),
        batch=BatchPlan(
            chosen.micro_batch_size,
            chosen.global_batch_size // (chosen.micro_batch_size * setup.num_data_ranks),
            chosen.global_batch_size,
        ),
        memory=predicted.memory,
        speed=None if setup.gpu is None else predict_step_time(setup, setup.gpu, padding, fill or 1.0),
        num_parameters=count_model(shape).total + (shape.vision.total if shape.vision else 0),
        num_trained=method_counts(shape, chosen).trained,
        num_steps=num_steps,
        fill_ratio=fill,
        num_tokens=num_tokens,
        notes=(
            *_notes_on_fit(run, predicted),
            *_notes_on_kernels(setup, trained_in, padding),
            *notes_on_forwards(run, setup),
            *_notes_on_data(run),
            *notes_on_pictures(run, setup),
            *notes_on_settings(run),
            *_notes_on_model(run),
        ),
        execution=execution,
        host_memory=predicted.host_memory,
    )


def plan_script(script: Script, code: tuple[CodePlan, ...], cluster: ClusterProfile, request: RunRequest) -> ScriptPlan:
    """Plan a script with its copies of code, the script's folder first. Raises `ConfigError` with every problem."""
    job = _plan_job(cluster, request, script.resources, "script")
    folders = site_folders(cluster, request.workspace, job["placement"].num_nodes)
    owned = (("settings" if key == "workspace" else f"cluster {cluster.name}", key, folder) for key, folder in folders)
    problems = [
        *check_job(cluster, request, script.resources, job["placement"]),
        *check_mounts(cluster, request.workspace, (*owned, (COMMAND_LINE, "--script", script.folder))),
    ]
    if problems:
        raise ConfigError([request.origins.locate(problem) for problem in problems])
    return ScriptPlan(**job, code=code, script=script)


def plan_model(model: ModelSpec, config: Mapping[str, Any] | None, counts: ModelCounts | None = None) -> ModelPlan:
    """Resolve a model to its complete shape, with its parameter counts.

    `config` is the raw configuration of the weights; None if there is none or it can't be read here. `counts` were
    counted on the model class; None derives them from the configuration or the shape. Raises `ConfigError` if the
    recipe contradicts the configuration, or if the two don't define the complete shape.
    """
    shape = resolve_shape(model, config)
    if counts is None and config is not None:
        try:
            counts = count_by_config(config)
        except (LookupError, TypeError, ValueError) as error:
            what = f"parameters can't be counted from its values ({type(error).__name__}: {one_line(error)})."
            fix = "Correct the file, or copy or download it again."
            raise ConfigError([Problem(f"config.json of {model.weights}", "model.weights", what, fix)]) from error
    return ModelPlan.extend(model, architecture=ArchitecturePlan.extend(shape, counts=counts or count_model(shape)))


def plan_for_counts(plan: RunPlan, counts: ModelCounts) -> RunPlan:
    """Return the plan updated with the parameter counts of the real model.

    A plan from estimates reshards all layers. With the counts, choose resharding and predict memory again. Micro-batch,
    checkpointing and replicas stay as planned.
    """
    shape = plan.recipe.model.architecture
    if shape.is_measured:
        return plan
    if shape.vision:  # counted in the model's class, too
        counts = replace(counts, around=counts.around - shape.vision.total)
    counted = ArchitecturePlan.extend(shape, counts=counts)
    planned, training = replace(plan.setup, shape=counted), plan.recipe.training
    setup = with_sharding(planned.with_training(shard_degree=planned.num_shards))
    model = plan.recipe.model.model_copy(update={"architecture": counted})
    return replace(
        plan,
        recipe=plan.recipe.model_copy(update={"model": model}),
        engine=replace(
            plan.engine,
            keeps_weights=setup.keeps_weights,
            defers_sync=setup.defers_sync,
            replays_graphs=replays_graphs(setup),
        ),
        memory=Fit(setup).memory,
        host_memory=Fit(setup).host_memory,
        num_parameters=counts.total + (shape.vision.total if shape.vision else 0),
        num_trained=method_counts(counted, training).trained,
    )


def fingerprint(recipe: RecipeSpec, model: ModelPlan, data_stamp: str) -> str:
    """Return the name of the prepared data: a hash of all inputs that determine the packs."""
    shared = shares_prompts(recipe, model.architecture)
    pairs = {"kto": recipe.training.objective == "kto", "drop": recipe.data.contradictions == "drop"}
    pairs["pictures"] = bool(recipe.data.pictures)
    keys = ("packing", "contradictions", "share_prompts", "pictures")
    out: dict[str, bool | set[str]] = {**dict.fromkeys(keys, True), "task": {"file"}}
    pairs[f"share {shared}"] = shared is not False
    parts = (
        str(PREPARATION_VERSION),
        recipe.data.model_dump_json(exclude=out),
        model.tokenizer.model_dump_json(),
        f"{model.weights}@{recipe.model.revision}" if model.tokenizer.source == "model" else "",
        *model.added_tokens,
        *map(str, (recipe.training.sequence_length, model.architecture.vocab_size)),  # the upper limit of token ids
        data_stamp,
        *(name for name, is_so in pairs.items() if is_so),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def packs_of_epochs(num_epochs: float, num_packs: int) -> int:
    """Return the number of packs in `num_epochs` passes over the data, rounded up, at least one."""
    return max(1, math.ceil(round(num_epochs * num_packs, 6)))


def count_steps(training: TrainingSpec, num_packs: int | None) -> int | None:
    """Return the number of optimizer steps; None while it depends on unprepared data."""
    if training.max_steps is not None:
        return training.max_steps
    if num_packs is None or training.num_epochs is None:
        return None
    return -(-packs_of_epochs(training.num_epochs, num_packs) // training.global_batch_size)


def container_image(cluster: ClusterProfile, image: AnyImage | None, workspace: Path) -> str | None:
    """Return the image in the runtime's form: a path, the docker engine's name, or an address."""
    if cluster.runtime == "none" or image is None:
        return None
    match image:
        case RegistryImage() as remote:
            uris = {"docker": remote.pinned, "apptainer": f"docker://{remote.pinned}"}
            return uris.get(cluster.runtime, remote.enroot_uri)
        case ImageFile(path):
            return str(path)
        case NamedImage() as named if cluster.runtime == "docker":
            return named.docker_name
        case NamedImage() as named:
            return str(Workspace(workspace).image_file(named, cluster.image_format))


def _plan_job(cluster: ClusterProfile, request: RunRequest, resources: ResourcesSpec, name: str) -> dict[str, Any]:
    """Return the fields that every kind of plan has: one process per GPU; a node's processes share its CPUs evenly."""
    if cluster.device == "auto":
        raise AssertionError("device 'auto' is resolved before a run is planned")
    key = cluster.size_key
    per_node = getattr(request, key) or getattr(resources, key) or cluster.max_processes
    threads = max(1, (cluster.cpus_per_node or per_node) // per_node)
    has_container, name = cluster.runtime != "none", request.name or name
    return {
        "version": 4,
        "ftkit_version": __version__,
        "id": f"{name}-{request.created:%Y%m%dT%H%M%SZ}-{request.suffix}",
        "name": name,
        "created": request.created,
        "workspace": request.workspace,
        "cluster": cluster,
        "placement": PlacementPlan(request.num_nodes or resources.num_nodes, per_node, cluster.device, threads),
        "image": str(request.image) if request.image and has_container else None,
        "container_image": container_image(cluster, request.image, request.workspace),
        "python": "python3" if has_container else request.python,
    }


# --- Notes of a plan: fit, suggestions and uncertainty ----------------------------------------------


def _notes_on_fit(run: RunInputs, predicted: Fit) -> Iterator[str]:
    setup, cluster, gpu = predicted.setup, run.cluster, predicted.setup.gpu
    if gpu is None:
        if cluster.scheduler == "slurm" and setup.device != "cpu":
            yield (
                f"the profile of '{cluster.name}' has no 'gpu', so the settings with the least memory are used, and no "
                f"speed is predicted: set it to one of {', '.join(GPUS)}, if it is one of these"
            )
    elif predicted.on_gpu(gpu.usable_gib):
        if faster := suggest_faster(run.training, setup, gpu):
            yield f"predicted to be faster with the same global batch: {faster}"
    else:
        when = ", while the teacher computes," if predicted.memory.moment == "teacher" else ""
        yield (
            f"predicted peak of {predicted.memory.total:.0f} GiB{when} is more than this GPU's {gpu.memory_gib:g} GiB "
            "can hold: expect an out-of-memory error"
        )
        for suggestion in suggest_changes(setup, cluster, gpu.usable_gib, run.may_have):
            yield f"predicted to fit: {suggestion}"
    if gpu is not None and setup.num_nodes > 1 and setup.node_bandwidth is None:
        yield (
            "the predicted speed leaves out the network between nodes: the cluster's profile sets no network_gbps, "
            "the gigabits per second of a node"
        )


def _notes_on_kernels(setup: Setup, image: ImageSpec | None, padding: float) -> Iterator[str]:
    """Yield notes on images whose torch all-gathers in bf16, on unmeasured GPUs, and on linear attention kernels."""
    gpu, family = setup.gpu, setup.shape.family
    version = "" if image is None else image.provided.get("torch", "")
    if image is not None and setup.gathers_in_fp8 and version.startswith(("2.6", "2.7")):
        yield (
            f"weights are all-gathered in bf16 with torch {version} of '{image.reference}', not in FP8: layers that "
            "stay unsharded take more memory than predicted (training.reshard_after_forward=always avoids it)"
        )
    if gpu is not None and not gpu.is_measured:
        yield (
            f"the speed is an upper bound: it assumes the share of {gpu.device_name}'s data sheet that Hopper GPUs "
            "reach, for lack of measurements; a low power limit allows less"
        )
    if setup.device == "cpu" or not has_linear_attention(setup.shape):
        return
    predictions = []
    for has_kernel in (True, False):
        each = replace(setup, has_linear_kernel=has_kernel)
        memory = f"{Fit(each).memory.total:.1f} GiB"
        speed = predict_step_time(each, gpu, padding).tokens_per_second / each.num_processes if gpu else None
        predictions.append(memory if speed is None else f"about {speed:,.0f} tokens/s per GPU and {memory}")
    with_kernel, without = predictions
    if image is not None and not setup.has_linear_kernel:
        lacks = f"{image.reference} does not list {LINEAR_KERNELS}, so PyTorch computes the linear attention"
        yield f"{lacks} of '{family}': {without}; with a kernel that runs on the GPU: {with_kernel}"
        return
    may_be_hopper = gpu is None or (gpu.has_fast_attention and not gpu.is_blackwell)
    hopper = f". On Hopper GPUs, {LINEAR_KERNELS} 0.6.0 needs Triton 3.7.1 or newer, or tilelang"
    yield (
        f"the plan assumes a kernel for the linear attention of '{family}' ({LINEAR_KERNELS}): {with_kernel}; where "
        f"none runs, PyTorch computes it: {without}{hopper if may_be_hopper else ''}"
    )


def _notes_on_data(run: RunInputs) -> Iterator[str]:
    model, padding = run.model, run.request.padding
    num_packs, batch = run.request.num_packs, run.training.global_batch_size
    if num_packs is not None and num_packs < batch:
        epochs = run.training.num_epochs
        effect = "the only step is smaller" if epochs and epochs <= 1 else "each step repeats documents"
        yield (
            f"the data fills {plural(num_packs, 'pack')}, fewer than the {batch:,} of a step: {effect}, and few steps "
            "train; use a smaller training.global_batch_size or sequence_length"
        )
    if (rows := model.vocab_size_of_weights) is not None:
        yield f"model.added_tokens: the embedding grows from {rows:,} to {run.shape.vocab_size:,} rows"
    elif model.new_tokens:
        yield f"model.added_tokens: free rows of the embedding for {plural(len(model.new_tokens), 'new token')}"
    if run.recipe.data.packing == "off":
        known = "as counted in the prepared data" if padding else "assumed until the data is prepared"
        yield (
            f"data.packing is 'off': each document is a padded row, which takes {padding or PADDING:.2f} times the "
            f"tokens of packs ({known}); the predicted speed includes it"
        )
    elif run.shape.family in UNPACKED:
        has_text = run.training.objective == "next_token" and not run.recipe.data.pictures
        pads = has_text and run.training.gpus_per_pack == 1
        outcome = "each document becomes a padded row, which is slower; plan with data.packing=off to see by how much"
        yield (
            f"'{run.shape.family}' keeps packed documents apart only with kernels of other packages, if at all: if the "
            f"check before step 1 finds that it does not, {outcome if pads else 'the run ends'}"
        )


_ESTIMATED: dict[CountSource, str] = {
    "formula": "parameters are counted exactly, memory and speed are estimates",
    "model": "parameters are counted on the model itself, memory and speed are estimates",
    "config": "parameters and memory are estimates",
    "family": "parameters and memory are estimates",
}


def _notes_on_model(run: RunInputs) -> Iterator[str]:
    shape, training, image = run.shape, run.training, run.image
    if shape.is_measured:
        return
    counts, family = count_model(shape), shape.family
    quantized = training.precision if training.trains_in_fp8 else training.quantization
    stored, matrices = quantized_experts(shape, training), counts.expert_matrices
    if counts.experts_per_token and quantized != "none" and not 0 < len(stored) == len(matrices):
        multiple = FP8_MULTIPLE if quantized == "fp8" else GROUPED_MULTIPLE
        reason = f"not all sizes of their matrices are multiples of {multiple}"
        if training.trains_in_fp8:
            reason = "in transformers 5 they are not linear layers"
        elif not matrices:
            reason = "their class computes them in a way of its own"
        elif not stored and not family_of(family).has_formula:
            reason = "so the plan assumes, because it does not know their class"
        which = "some matrices of the experts" if stored else "the experts"
        yield f"{which} of '{family}' compute and stay in bf16, not in {quantized}: {reason}"
    yield (
        f"'{family}' is none of {', '.join(MEASURED)}: {_ESTIMATED[counts.source]}, and whether it can be trained is "
        "checked when the job starts"
    )
    if counts.source == "family" and counts.experts_per_token and shape.num_experts is None:
        yield (
            f"'{family}' is a mixture of experts, and their number can't be read here: the plan assumes the largest "
            "usual one (for an exact plan, download the weights' config.json)"
        )
    elif run.model.count_error:
        yield f"the parameters of '{family}' can't be counted on its class: {run.model.count_error}"
    elif not counts.is_exact:
        yield (
            f"to count the parameters of '{family}' exactly, plan with torch and a transformers that has the family: "
            "pip install 'ftkit[train]'"
        )
    if image is not None and run.cluster.runtime != "none" and family not in image.families:
        yield f"'{image.reference}' is not made for '{family}': its transformers must support it"
