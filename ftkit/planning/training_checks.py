"""Checks of a recipe's training against its model, the cluster's GPUs, and their number."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ftkit.config.execution import FP8_MULTIPLE, ROUTERS, indivisible_sizes
from ftkit.errors import Problem, plural
from ftkit.models.families import MEASURED, WITHOUT_OUT_PROJ_ADAPTERS
from ftkit.models.parameters import count_model
from ftkit.planning.training_setup import GPUS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.config.cluster import ClusterProfile
    from ftkit.config.image import ImageSpec
    from ftkit.config.recipe import RecipeSpec
    from ftkit.config.training import TrainingSpec
    from ftkit.models.spec import ArchitecturePlan, ModelPlan

problem = partial(Problem, "")
"""A problem with a key of the recipe; `find_problems` adds the key's file and line."""


def check_training(
    recipe: RecipeSpec,
    model: ModelPlan,
    cluster: ClusterProfile,
    image: ImageSpec | None,
    num_nodes: int,
    processes_per_node: int,
) -> Iterator[Problem]:
    """Yield the reasons why the model can't be trained like this on these GPUs."""
    shape, world_size = model.architecture, num_nodes * processes_per_node
    yield from _adapters(recipe, model)
    yield from _added_tokens(recipe, model)
    yield from _batch(recipe, world_size)
    yield from _context_parallel(recipe, shape, processes_per_node, cluster, image)
    yield from _tensor_parallel(recipe, shape, processes_per_node)
    yield from _checkpointed_layers(recipe, shape)
    yield from _shard_degree(recipe, world_size)
    yield from _offload(recipe, cluster)
    yield from _kernels(recipe, cluster)
    yield from _fp8(recipe, shape, cluster)
    yield from _collectives(recipe, cluster, num_nodes, processes_per_node)
    yield from _engine(recipe)
    yield from _targets(recipe, shape, cluster)
    yield from _load_balancing(recipe, shape)


def _adapters(recipe: RecipeSpec, model: ModelPlan) -> Iterator[Problem]:
    if model.adapter is not None and recipe.training.adapters is None:
        yield problem(
            "training.method", f"'full' does not train the adapters of {model.source}.",
            "Use 'lora' or 'qlora'; or merge them into their model, and give model.weights the folder.",
        )  # fmt: skip


def _added_tokens(recipe: RecipeSpec, model: ModelPlan) -> Iterator[Problem]:
    is_new = model.new_tokens or model.vocab_size_of_weights is not None
    if is_new and recipe.training.adapters is not None:
        names = ", ".join(model.new_tokens or recipe.model.added_tokens)
        yield problem(
            "model.added_tokens",
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
    yield problem(
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
        yield problem(
            "training.offload",
            f"'{recipe.training.offload}' has no effect without GPUs: everything is in host memory anyway.",
            "Use 'none', or a cluster with GPUs.",
        )  # fmt: skip
    if recipe.training.activation_offload and cluster.device == "cpu":
        yield problem(
            "training.activation_offload",
            "has no effect without GPUs: everything is in host memory anyway.",
            "Leave it out, or use a cluster with GPUs.",
        )  # fmt: skip


def _checkpointed_layers(recipe: RecipeSpec, shape: ArchitecturePlan) -> Iterator[Problem]:
    existing = shape.num_hidden_layers
    for key in ("checkpointed_layers", "offloaded_layers"):
        num = getattr(recipe.training, key)
        if num is not None and num > existing:
            yield problem(
                f"training.{key}",
                f"{num} is more than the model's {plural(existing, 'decoder layer')}.", "Leave it out for all layers.",
            )  # fmt: skip


def _kernels(recipe: RecipeSpec, cluster: ClusterProfile) -> Iterator[Problem]:
    training = recipe.training
    if training.attention in {"flash4", "flex"} and cluster.device == "cpu":
        yield problem("training.attention", f"'{training.attention}' is a kernel for GPUs.", "Use 'auto'.")
    if training.attention == "flash4" and training.compute_precision == "fp32":
        yield problem("training.attention", "'flash4' computes only in bf16.", "Use 'auto', or precision bf16.")
    if training.compile == "layers" and training.engine == "zero3":
        yield problem("training.compile", "'layers' has no effect with engine 'zero3'.", "Use 'auto'.")


def _collectives(
    recipe: RecipeSpec, cluster: ClusterProfile, num_nodes: int, processes_per_node: int
) -> Iterator[Problem]:
    if recipe.training.collectives != "copy_engine":
        return
    if cluster.device == "cpu" or num_nodes != 1 or processes_per_node == 1:
        yield problem(
            "training.collectives", "copy engines copy between the GPUs of one node: this run has "
            f"{num_nodes} x {processes_per_node} processes with device '{cluster.device}'.", "Use 'auto'.",
        )  # fmt: skip


def _engine(recipe: RecipeSpec) -> Iterator[Problem]:
    training = recipe.training
    for setting in training.only_with_fsdp2 if training.engine == "zero3" else ():
        yield problem(
            f"training.{setting}",
            f"'{getattr(training, setting)}' is not supported by engine 'zero3'.",
            "Use engine 'auto' or 'fsdp2', or leave it out.",
        )  # fmt: skip


def _targets(recipe: RecipeSpec, shape: ArchitecturePlan, cluster: ClusterProfile) -> Iterator[Problem]:
    adapters, counts = recipe.training.adapters, count_model(shape)
    if adapters and "out_proj" in adapters.targets and shape.family in WITHOUT_OUT_PROJ_ADAPTERS:
        yield problem(
            "training.lora.targets", f"out_proj of a {shape.family} can't have adapters: kernels ignore them.",
            "Leave it out.",
        )  # fmt: skip
    # In the container's transformers, experts may be linear layers although they are not here, or vice versa.
    if adapters is None or not (shape.is_measured or (counts.is_exact and cluster.runtime == "none")):
        return
    of_experts = [name for each in counts.expert_matrices for name in (each.parts or (each.name,))]
    known = list(dict.fromkeys((*(linear.name for linear in counts.linears), *of_experts)))
    accepted = {*known, *(each.name for each in counts.expert_matrices)}
    if unknown := [name for name in adapters.targets if name not in accepted]:
        yield problem(
            "training.lora.targets", f"{', '.join(unknown)}: {shape.family} has no such projection.",
            f"It has {', '.join(known)}.",
        )  # fmt: skip
    for matrix in counts.expert_matrices:
        if missing := matrix.missing_parts(adapters.targets):
            yield problem(
                "training.lora.targets",
                f"{' and '.join(matrix.parts)} of the experts are adapted together: {', '.join(missing)} is missing.",
                "Name all of them, or none.",
            )  # fmt: skip
        if adapters.use_dora and matrix.num_ranks(adapters.targets):
            yield problem(
                "training.lora.use_dora", f"{matrix.name} of the experts has no DoRA, in peft neither.",
                "Leave it out, or name other layers in training.lora.targets.",
            )  # fmt: skip


def _load_balancing(recipe: RecipeSpec, shape: ArchitecturePlan) -> Iterator[Problem]:
    coefficient = recipe.training.router_aux_loss_coef
    if coefficient and not count_model(shape).experts_per_token:
        yield problem(
            "training.router_aux_loss_coef",
            f"{coefficient:g} weights the load-balancing loss of a mixture of experts: {shape.family} is dense.",
            "Leave it out, or choose a mixture of experts.",
        )  # fmt: skip


# --- Parallelism -----------------------------------------------------------------------------------

FLASH4 = "flash-attn-4"


def why_undivided(training: TrainingSpec, cluster: ClusterProfile, image: ImageSpec | None) -> str:
    """Return why no attention kernel can divide packs among GPUs; empty if none is known to be missing."""
    gpu = GPUS[cluster.gpu] if cluster.gpu else None
    if training.attention == "sdpa" or cluster.device == "cpu":
        return ""
    if gpu is not None and not gpu.runs_flash4(training):
        return f"which this recipe can't use on {gpu.device_name}"
    if image is not None and cluster.runtime != "none" and FLASH4 not in image.listed_packages:
        return f"which {image.reference} does not list"
    return ""


def _context_parallel(
    recipe: RecipeSpec, shape: ArchitecturePlan, per_node: int, cluster: ClusterProfile, image: ImageSpec | None
) -> Iterator[Problem]:
    heads = shape.num_attention_heads
    if recipe.training.context_parallel == 1:
        return
    key, size = "training.context_parallel", recipe.training.gpus_per_pack
    yield from _groups(recipe, key, size, per_node)
    if reason := why_undivided(recipe.training, cluster, image):
        yield problem(
            key, f"needs {FLASH4}, {reason}.",
            "Use an image with it ('ftkit images') on Hopper or newer, in bf16; or training.attention=sdpa.",
        )  # fmt: skip
    if heads % size:
        with_parts_of_layers = " for the product with tensor_parallel" * (recipe.training.tensor_parallel > 1)
        yield problem(
            key, f"{heads} attention heads of the model can't be divided among {size} GPUs.",
            f"Use a divisor of {heads}{with_parts_of_layers}.",
        )  # fmt: skip


def _tensor_parallel(recipe: RecipeSpec, shape: ArchitecturePlan, per_node: int) -> Iterator[Problem]:
    size = recipe.training.tensor_parallel
    if size == 1:
        return
    key = "training.tensor_parallel"
    yield from _groups(recipe, key, size, per_node)
    if shape.family not in MEASURED:
        yield problem(
            key, f"the layers of a '{shape.family}' can't be divided, only those of {', '.join(MEASURED)}.",
            "Leave it out.",
        )  # fmt: skip
        return
    sizes = (shape.num_attention_heads, shape.num_key_value_heads, shape.intermediate_size)
    for name, number in indivisible_sizes(*sizes, size).items():
        yield problem(key, f"{number:,} {name} can't be divided among {size} GPUs.", f"Use a divisor of {number:,}.")
    if recipe.evaluation.generation is not None:
        yield problem(
            key, "a divided model computes losses, but can't generate completions for the evaluation.",
            "Set evaluation.generation to null, and use 'ftkit eval' after training.",
        )  # fmt: skip


def _groups(recipe: RecipeSpec, key: str, size: int, per_node: int) -> Iterator[Problem]:
    """Yield the problems of groups of GPUs that divide packs."""
    if per_node % size:
        yield problem(
            key, f"{per_node} GPUs of a node can't be divided into groups of {size}.",
            f"Use a divisor of {per_node}, or another --gpus-per-node.",
        )  # fmt: skip
    if recipe.data.packing == "off":
        yield problem(key, "divides the tokens of packs, and data.packing is 'off'.", "Use data.packing 'auto'.")


def _shard_degree(recipe: RecipeSpec, world_size: int) -> Iterator[Problem]:
    degree = recipe.training.shard_degree
    if degree != "auto" and world_size % degree:
        yield problem(
            "training.shard_degree",
            f"{world_size} GPUs can't be divided into groups of {degree}.",
            f"Use 'auto', or a divisor of {world_size}.",
        )  # fmt: skip


# --- FP8 -------------------------------------------------------------------------------------------


def _fp8(recipe: RecipeSpec, shape: ArchitecturePlan, cluster: ClusterProfile) -> Iterator[Problem]:
    """Yield the problems of a recipe's FP8 settings."""
    training = recipe.training
    if not training.fp8_all_gather and training.precision != "fp8":
        yield problem(
            "training.fp8_all_gather",
            f"has no effect with precision '{training.precision}': only 'fp8' all-gathers in FP8.", "Leave it out.",
        )  # fmt: skip
    if not training.multiplies_in_fp8:
        return
    key = "precision" if training.trains_in_fp8 else "base_precision"
    if cluster.gpu is not None and not GPUS[cluster.gpu].has_fp8:
        yield problem(
            f"training.{key}", f"{GPUS[cluster.gpu].device_name} does not multiply in FP8; Ada, Hopper and "
            "newer GPUs do.", f"Leave training.{key} out.",
        )  # fmt: skip
    if not _has_multiples(recipe, shape):
        yield problem(
            f"training.{key}", f"has no effect on this model: no linear layer of its decoder layers has inputs "
            f"and outputs that are multiples of {FP8_MULTIPLE}, as FP8 needs.", f"Leave training.{key} out.",
        )  # fmt: skip


def _has_multiples(recipe: RecipeSpec, shape: ArchitecturePlan) -> bool:
    """Return whether a matrix would be multiplied in FP8; estimated counts may lack some."""
    counts = count_model(shape)
    sizes = [(each.inputs, each.outputs) for each in counts.linears if each.name not in ROUTERS]
    if not recipe.training.trains_in_fp8:  # trained experts are in bf16
        sizes += [(each.inputs, each.outputs) for each in counts.expert_matrices]
    return not counts.is_exact or any(inputs % FP8_MULTIPLE == outputs % FP8_MULTIPLE == 0 for inputs, outputs in sizes)
