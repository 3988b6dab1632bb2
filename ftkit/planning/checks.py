"""The checks that need more than one spec. Each yields all problems that it finds."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from ftkit.config.cluster import ClusterProfile, mounted_folders
from ftkit.config.data import CHAT_TEMPLATES
from ftkit.config.execution import are_quantized
from ftkit.config.recipe import SINK_PACKAGES, RecipeSpec, sinks_without_package
from ftkit.errors import Problem, plural
from ftkit.models.families import MEASURED, UNPACKED, WITHOUT_OUT_PROJ_ADAPTERS
from ftkit.models.parameters import count_model
from ftkit.planning.evaluation_checks import check_evaluation
from ftkit.planning.fp8_checks import check_fp8
from ftkit.planning.job_checks import check_image, check_mounts, check_placement, check_time_limit, image_origin
from ftkit.planning.parallelism_checks import check_context_parallel, check_shard_degree, check_tensor_parallel
from ftkit.planning.step_time import PADDING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.config.image import ImageSpec
    from ftkit.config.request import RunRequest
    from ftkit.models.spec import ArchitecturePlan, CountSource, ModelPlan


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
    shape = model.architecture
    folders = mounted_folders(recipe, cluster, request.workspace, num_nodes)
    owned = ((_owner(key, recipe, cluster), key, folder) for key, folder in folders)
    problems = [
        *_adapters(recipe, model),
        *_added_tokens(recipe, model),
        *check_placement(cluster, request, num_nodes, processes_per_node, recipe.resources.spare_nodes),
        *check_time_limit(cluster, recipe.resources.time_limit),
        *_batch(recipe, num_nodes * processes_per_node),
        *check_context_parallel(recipe, shape, processes_per_node, cluster, image),
        *check_tensor_parallel(recipe, shape, processes_per_node),
        *_checkpointed_layers(recipe, shape),
        *check_shard_degree(recipe, num_nodes * processes_per_node),
        *_offload(recipe, cluster),
        *_kernels(recipe, cluster),
        *check_fp8(recipe, shape, cluster),
        *_collectives(recipe, cluster, num_nodes, processes_per_node),
        *_engine(recipe),
        *_targets(recipe, shape, cluster),
        *_load_balancing(recipe, shape),
        *find_data_problems(recipe, shape),
        *check_evaluation(recipe),
        *_profile(recipe, num_nodes * processes_per_node),
        *check_image(cluster, request),
        *_family_of_image(shape, cluster, image, request),
        *_sinks(recipe, cluster, image),
        *check_mounts(cluster, request.workspace, owned),
    ]
    return [request.origins.locate(problem) for problem in problems]


def find_data_problems(recipe: RecipeSpec, shape: ArchitecturePlan) -> list[Problem]:
    """Return all reasons why the recipe's data can't be used with its model, wherever it is trained."""
    return [*_lengths(recipe, shape), *_data(recipe)]


def _adapters(recipe: RecipeSpec, model: ModelPlan) -> Iterator[Problem]:
    if model.adapter is not None and recipe.training.adapters is None:
        yield Problem(
            f"recipe {recipe.name}", "training.method", f"'full' does not train the adapters of {model.source}.",
            "Use 'lora' or 'qlora'; or merge them into their model, and give model.weights the folder.",
        )  # fmt: skip


def _added_tokens(recipe: RecipeSpec, model: ModelPlan) -> Iterator[Problem]:
    is_new = model.new_tokens or model.vocab_size_of_weights is not None
    if is_new and recipe.training.adapters is not None:
        names = ", ".join(model.new_tokens or recipe.model.added_tokens)
        yield Problem(
            f"recipe {recipe.name}", "model.added_tokens",
            f"{names}: method '{recipe.training.method}' leaves the embedding frozen, so new tokens would stay "
            "untrained, even where it has free rows.",
            "Use training.method 'full'; or leave them out, or use special tokens that the tokenizer has.",
        )  # fmt: skip


def _batch(recipe: RecipeSpec, world_size: int) -> Iterator[Problem]:
    training = recipe.training
    micro = 1 if training.micro_batch_size == "auto" else training.micro_batch_size
    num = max(1, world_size // training.gpus_per_pack)
    at_once = micro * num
    if world_size < 1 or training.global_batch_size % at_once == 0:
        return
    owners = f"{num} {'processes' if training.gpus_per_pack == 1 else 'groups of processes'}"
    up = -(-training.global_batch_size // at_once) * at_once
    down = up - at_once
    yield Problem(
        f"recipe {recipe.name}",
        "training.global_batch_size",
        f"{training.global_batch_size} is not divisible by {at_once} "
        f"(micro_batch_size {training.micro_batch_size} x {owners})."
        if micro > 1
        else f"{plural(training.global_batch_size, 'pack')} can't be divided evenly among {owners}.",
        f"Use {down} or {up}."
        if down
        else f"Use {up}, or fewer GPUs{', or a smaller micro_batch_size' * (micro > 1)}.",
    )


def _offload(recipe: RecipeSpec, cluster: ClusterProfile) -> Iterator[Problem]:
    if recipe.training.offload != "none" and cluster.device == "cpu":
        yield Problem(
            f"recipe {recipe.name} on cluster {cluster.name}", "training.offload",
            f"'{recipe.training.offload}' has no effect without GPUs: everything is in host memory anyway.",
            "Use 'none', or a cluster with GPUs.",
        )  # fmt: skip
    if recipe.training.activation_offload and cluster.device == "cpu":
        yield Problem(
            f"recipe {recipe.name} on cluster {cluster.name}", "training.activation_offload",
            "has no effect without GPUs: everything is in host memory anyway.",
            "Leave it out, or use a cluster with GPUs.",
        )  # fmt: skip


def _checkpointed_layers(recipe: RecipeSpec, shape: ArchitecturePlan) -> Iterator[Problem]:
    existing = shape.num_hidden_layers
    for key in ("checkpointed_layers", "offloaded_layers"):
        num = getattr(recipe.training, key)
        if num is not None and num > existing:
            yield Problem(
                f"recipe {recipe.name}", f"training.{key}",
                f"{num} is more than the model's {plural(existing, 'decoder layer')}.", "Leave it out for all layers.",
            )  # fmt: skip


def _kernels(recipe: RecipeSpec, cluster: ClusterProfile) -> Iterator[Problem]:
    training, where = recipe.training, f"recipe {recipe.name} on cluster {cluster.name}"
    if training.attention in {"flash4", "flex"} and cluster.device == "cpu":
        yield Problem(where, "training.attention", f"'{training.attention}' is a kernel for GPUs.", "Use 'auto'.")
    if training.attention == "flash4" and training.compute_precision == "fp32":
        yield Problem(where, "training.attention", "'flash4' computes only in bf16.", "Use 'auto', or precision bf16.")
    if training.compile == "layers" and training.engine == "zero3":
        yield Problem(where, "training.compile", "'layers' has no effect with engine 'zero3'.", "Use 'auto'.")


def _collectives(
    recipe: RecipeSpec, cluster: ClusterProfile, num_nodes: int, processes_per_node: int
) -> Iterator[Problem]:
    if recipe.training.collectives != "copy_engine":
        return
    where = f"recipe {recipe.name} on cluster {cluster.name}"
    if cluster.device == "cpu" or num_nodes != 1 or processes_per_node == 1:
        yield Problem(
            where, "training.collectives", "copy engines copy between the GPUs of one node: this run has "
            f"{num_nodes} x {processes_per_node} processes with device '{cluster.device}'.", "Use 'auto'.",
        )  # fmt: skip


def _engine(recipe: RecipeSpec) -> Iterator[Problem]:
    training = recipe.training
    for setting in training.only_with_fsdp2 if training.engine == "zero3" else ():
        yield Problem(
            f"recipe {recipe.name}", f"training.{setting}",
            f"'{getattr(training, setting)}' is not supported by engine 'zero3'.",
            "Use engine 'auto' or 'fsdp2', or leave it out.",
        )  # fmt: skip


def _targets(recipe: RecipeSpec, shape: ArchitecturePlan, cluster: ClusterProfile) -> Iterator[Problem]:
    adapters, counts, where = recipe.training.adapters, count_model(shape), f"recipe {recipe.name}"
    if adapters and "out_proj" in adapters.targets and shape.family in WITHOUT_OUT_PROJ_ADAPTERS:
        yield Problem(
            where, "training.lora.targets", f"out_proj of a {shape.family} can't have adapters: kernels ignore them.",
            "Leave it out.",
        )  # fmt: skip
    # In the container's transformers, experts may be linear layers although they are not here, or vice versa.
    if adapters is None or not (shape.is_measured or (counts.is_exact and cluster.runtime == "none")):
        return
    of_experts = [name for each in counts.expert_matrices for name in (each.parts or (each.name,))]
    known = list(dict.fromkeys((*(linear.name for linear in counts.linears), *of_experts)))
    accepted = {*known, *(each.name for each in counts.expert_matrices)}
    if unknown := [name for name in adapters.targets if name not in accepted]:
        yield Problem(
            where, "training.lora.targets", f"{', '.join(unknown)}: {shape.family} has no such projection.",
            f"It has {', '.join(known)}.",
        )  # fmt: skip
    for matrix in counts.expert_matrices:
        if missing := matrix.missing_parts(adapters.targets):
            yield Problem(
                where, "training.lora.targets",
                f"{' and '.join(matrix.parts)} of the experts are adapted together: {', '.join(missing)} is missing.",
                "Name all of them, or none.",
            )  # fmt: skip
        if adapters.use_dora and matrix.num_ranks(adapters.targets):
            yield Problem(
                where, "training.lora.use_dora", f"{matrix.name} of the experts has no DoRA, in peft neither.",
                "Leave it out, or name other layers in training.lora.targets.",
            )  # fmt: skip


def _load_balancing(recipe: RecipeSpec, shape: ArchitecturePlan) -> Iterator[Problem]:
    coefficient = recipe.training.router_aux_loss_coef
    if coefficient and not count_model(shape).experts_per_token:
        yield Problem(
            f"recipe {recipe.name}", "training.router_aux_loss_coef",
            f"{coefficient:g} weights the load-balancing loss of a mixture of experts: {shape.family} is dense.",
            "Leave it out, or choose a mixture of experts.",
        )  # fmt: skip


def _lengths(recipe: RecipeSpec, shape: ArchitecturePlan) -> Iterator[Problem]:
    where = f"recipe {recipe.name}"
    if recipe.training.sequence_length > shape.max_position_embeddings:
        yield Problem(
            where, "training.sequence_length",
            f"{recipe.training.sequence_length} is longer than the model's {shape.max_position_embeddings} positions.",
            f"Use a shorter one, or {_more_positions(recipe, shape)}.",
        )  # fmt: skip
    vocabulary = recipe.model.tokenizer.vocab_size
    if vocabulary is not None and vocabulary > shape.vocab_size:
        yield Problem(
            where, "model.tokenizer.vocab_size",
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
    data, where = recipe.data, f"recipe {recipe.name}"
    if recipe.model.tokenizer.source == "trained" and data.chat_template not in CHAT_TEMPLATES:
        yield Problem(
            where, "data.chat_template", "a tokenizer that ftkit trains needs a template that ftkit ships.",
            f"Use one of {', '.join(CHAT_TEMPLATES)}.",
        )  # fmt: skip
    if data.too_long == "split" and data.format.kind not in ("text", "auto"):
        yield Problem(
            where, "data.too_long", "a conversation can't be split: its later parts would lack their context.",
            "Use 'truncate', which cuts after a turn that fits, or 'drop'.",
        )  # fmt: skip
    if data.train_on == "completion" and data.format.kind in ("messages", "text"):
        yield Problem(
            where, "data.train_on", f"format '{data.format.kind}' has no prompts and completions.",
            "Use 'assistant', 'last' or 'all'.",
        )  # fmt: skip


def _profile(recipe: RecipeSpec, world_size: int) -> Iterator[Problem]:
    profile, max_steps, where = recipe.profile, recipe.training.max_steps, f"recipe {recipe.name}"
    if not profile.enabled:
        return
    absent = [str(rank) for rank in profile.ranks if rank >= world_size]
    if absent:
        yield Problem(
            where,
            "profile.ranks",
            f"there is no rank {', '.join(absent)} in {plural(world_size, 'process')}, counted from 0.",
        )
    if max_steps is not None and profile.num_steps > max_steps:
        yield Problem(
            where, "profile", f"takes {plural(profile.num_steps, 'step')}, the run has {max_steps}.",
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
        yield Problem(
            f"recipe {recipe.name}", "tracking.sinks", f"'{sink}' needs the package {package}, which "
            f"{image.reference} does not list.",
            f"Add it to 'packages:' of the image and lock it again (ftkit images lock {image.reference}); if its base "
            f"has it, list it under 'provided:'; or remove {sink}.",
        )  # fmt: skip


_ESTIMATED: dict[CountSource, str] = {
    "formula": "parameters are counted exactly, memory and speed are estimates",
    "model": "parameters are counted on the model itself, memory and speed are estimates",
    "config": "parameters and memory are estimates",
    "family": "parameters and memory are estimates",
}


def find_notes(
    recipe: RecipeSpec, model: ModelPlan, cluster: ClusterProfile, image: ImageSpec | None, padding: float | None
) -> Iterator[str]:
    """Yield notes on added tokens, and on parts of the plan that are uncertain or slow."""
    shape, rows, training = model.architecture, model.vocab_size_of_weights, recipe.training
    if rows is not None:
        yield f"model.added_tokens: the embedding grows from {rows:,} to {shape.vocab_size:,} rows"
    elif model.new_tokens:
        yield f"model.added_tokens: free rows of the embedding for {plural(len(model.new_tokens), 'new token')}"
    if recipe.data.packing == "off":
        known = "as counted in the prepared data" if padding else "assumed until the data is prepared"
        yield (
            f"data.packing is 'off': each document is a padded row, which takes {padding or PADDING:.2f} times the "
            f"tokens of packs ({known}); the predicted speed includes it"
        )
    elif shape.family in UNPACKED:
        yield (
            f"'{shape.family}' keeps packed documents apart only with kernels of other packages, if at all: if the "
            "check before step 1 finds that it does not, each document becomes a padded row, which is slower; plan "
            "with data.packing=off to see by how much"
        )
    if shape.is_measured:
        return
    counts = count_model(shape)
    quantized = training.precision if training.trains_in_fp8 else training.quantization
    in_8_bits = {are_quantized(training.quantization, each) for each in counts.expert_matrices}
    if counts.experts_per_token and quantized != "none" and in_8_bits != {True}:
        yield (
            f"the experts of '{shape.family}' compute and stay in bf16, not in {quantized}: in transformers 5 they are "
            "not linear layers"
        )
    yield (
        f"'{shape.family}' is none of {', '.join(MEASURED)}: {_ESTIMATED[counts.source]}, and whether it can "
        "be trained is checked when the job starts"
    )
    yield from _notes_on_counts(model)
    if image is not None and cluster.runtime != "none" and shape.family not in image.families:
        yield f"'{image.reference}' is not made for '{shape.family}': its transformers must support it"


def _notes_on_counts(model: ModelPlan) -> Iterator[str]:
    """Yield notes on parameters that are not counted exactly."""
    shape, counts = model.architecture, count_model(model.architecture)
    if counts.source == "family" and counts.experts_per_token:
        yield (
            f"'{shape.family}' is a mixture of experts, and their number can't be read here: the plan assumes the "
            "largest usual one (for an exact plan, download the weights' config.json)"
        )
    elif model.count_error:
        yield f"the parameters of '{shape.family}' can't be counted on its class: {model.count_error}"
    elif not counts.is_exact:
        yield (
            f"to count the parameters of '{shape.family}' exactly, plan with torch and a transformers that has the "
            "family: pip install 'ftkit[train]'"
        )


def _owner(key: str, recipe: RecipeSpec, cluster: ClusterProfile) -> str:
    """Return the spec that a key belongs to, for a key whose file is unknown."""
    first = key.partition(".")[0]
    if first in ClusterProfile.model_fields:
        return f"cluster {cluster.name}"
    return f"recipe {recipe.name}" if first in RecipeSpec.model_fields else "settings"
