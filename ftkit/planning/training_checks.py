"""Check a recipe's training settings against its model, the cluster's GPUs, and their number."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ftkit.config.cluster import ClusterProfile
from ftkit.config.data import label_of
from ftkit.config.execution import (
    FLEX_MINIMUM,
    FP8_MULTIPLE,
    ROUTERS,
    indivisible_sizes,
    only_with_fsdp2,
    quantized_experts,
)
from ftkit.config.image import ImageSpec
from ftkit.config.recipe import RecipeSpec, why_not_shared
from ftkit.config.request import RunRequest
from ftkit.errors import Problem, plural
from ftkit.models.architecture import ArchitecturePlan, ModelPlan
from ftkit.models.families import MEASURED, WITHOUT_BALANCING_LOSS, WITHOUT_OUT_PROJ_ADAPTERS, family_of
from ftkit.models.parameters import count_model
from ftkit.planning.flops import has_linear_attention
from ftkit.planning.plan import PlacementPlan
from ftkit.planning.training_setup import GPUS

if TYPE_CHECKING:
    from ftkit.config.training import TrainingSpec

problem = partial(Problem, "")  # a problem with a key of the recipe; `find_problems` adds the key's file and line


@dataclass(frozen=True)
class RunInputs:
    recipe: RecipeSpec
    model: ModelPlan
    cluster: ClusterProfile
    image: ImageSpec | None
    request: RunRequest
    placement: PlacementPlan

    @property
    def shape(self) -> ArchitecturePlan:
        return self.model.architecture

    @property
    def training(self) -> TrainingSpec:
        return self.recipe.training

    def may_have(self, change: Mapping[str, object]) -> bool:
        """Return whether the model can be trained after a change of `training`, or with twice the nodes."""
        fields = {field: value for field, value in change.items() if field != "num_nodes"}
        recipe = self.recipe.model_copy(update={"training": self.training.model_copy(update=fields)})
        num_nodes = self.placement.num_nodes * (2 if "num_nodes" in change else 1)
        run = replace(self, recipe=recipe, placement=replace(self.placement, num_nodes=num_nodes))
        return not any(check_training(run))


def check_training(run: RunInputs) -> Iterator[Problem]:
    """Yield the reasons why the model can't be trained with these settings on these GPUs."""
    checks = (
        _adapters, _batch, _context_parallel, _tensor_parallel, _layers, _hardware, _torch, _fp8, _engine,
        _targets, _packs, _pictures, _preferences, _shared_prompts, _teacher,
    )  # fmt: skip
    for check in checks:
        yield from check(run)


def _adapters(run: RunInputs) -> Iterator[Problem]:
    model, method = run.model, run.training.method
    if model.adapter is not None and method == "full":
        fix = "Use 'lora' or 'qlora'; or merge them into their model, and give model.weights the folder."
        yield problem("training.method", f"'full' does not train the adapters of {model.source}.", fix)
    if (model.new_tokens or model.vocab_size_of_weights is not None) and method != "full":
        names = ", ".join(model.new_tokens or run.recipe.model.added_tokens)
        what = f"{names}: method '{method}' leaves the embedding frozen, even its free rows: new tokens stay untrained."
        fix = "Use training.method 'full'; or leave them out, or use special tokens that the tokenizer has."
        yield problem("model.added_tokens", what, fix)


def _batch(run: RunInputs) -> Iterator[Problem]:
    training, world_size = run.training, run.placement.world_size
    micro = 1 if training.micro_batch_size == "auto" else training.micro_batch_size
    num = max(1, world_size // training.gpus_per_pack)
    at_once = micro * num
    if training.shard_degree != "auto" and world_size % training.shard_degree:
        what = f"{world_size} GPUs can't be divided into groups of {training.shard_degree}."
        yield problem("training.shard_degree", what, f"Use 'auto', or a divisor of {world_size}.")
    if world_size < 1 or training.global_batch_size % at_once == 0:
        return
    owners = f"{num} {'processes' if training.gpus_per_pack == 1 else 'groups of processes'}"
    packs = plural(training.global_batch_size, "pack")
    what = f"{packs} can't be divided evenly by {at_once}: micro_batch_size {micro} x {owners}."
    up = -(-training.global_batch_size // at_once) * at_once
    fix = f"Use {up - at_once} or {up}." if up > at_once else f"Use {up}, fewer processes, or a smaller micro-batch."
    yield problem("training.global_batch_size", what, fix)


def _layers(run: RunInputs) -> Iterator[Problem]:
    existing = run.shape.num_hidden_layers
    for key in ("checkpointed_layers", "offloaded_layers"):
        num = getattr(run.training, key)
        if num is not None and num > existing:
            what = f"{num} is more than the model's {plural(existing, 'decoder layer')}."
            yield problem(f"training.{key}", what, "Leave it out for all layers.")


def _hardware(run: RunInputs) -> Iterator[Problem]:
    training, device, place = run.training, run.cluster.device, run.placement
    if device == "cpu":
        reason = "has no effect without GPUs: everything is in host memory anyway."
        if training.offload != "none":
            fix = "Use 'none', or a cluster with GPUs."
            yield problem("training.offload", f"'{training.offload}' {reason}", fix)
        if training.activation_offload:
            yield problem("training.activation_offload", reason, "Leave it out, or use a cluster with GPUs.")
        if training.attention in {"flash4", "cudnn", "flex"}:
            yield problem("training.attention", f"'{training.attention}' is a kernel for GPUs.", "Use 'auto'.")
    gpu, attention = GPUS[run.cluster.gpu] if run.cluster.gpu else None, training.attention
    package, has_sinks = _KERNELS_OF_PACKS.get(attention), family_of(run.shape.family).has_sinks
    image = run.image
    failures = (
        (package and training.compute_precision == "fp32", "computes only in bf16"),
        (package and gpu and not gpu.has_fast_attention, f"needs Hopper or newer, not {gpu and gpu.device_name}"),
        (package and not _lists(run, package), f"needs {package}, which {image and image.reference} does not list"),
        (has_sinks and (package or attention == "sdpa"), f"can't compute the attention sinks of '{run.shape.family}'"),
        (attention == "cudnn" and training.deterministic, "does not repeat, as training.deterministic asks"),
        (attention == "flex" and training.sequence_length < FLEX_MINIMUM, f"needs packs of {FLEX_MINIMUM} tokens"),
    )
    for reason in (reason for applies, reason in failures if applies):
        yield problem("training.attention", f"'{attention}' {reason}.", "Use 'auto'.")
    if training.deterministic and device == "cuda" and has_linear_attention(run.shape):
        yield problem("training.deterministic", f"linear attention of '{run.shape.family}' varies.", "Leave it out.")
    is_one_node = place.num_nodes == 1 < place.processes_per_node
    if training.collectives == "copy_engine" and (device == "cpu" or not is_one_node):
        size = f"{place.num_nodes} x {place.processes_per_node}"
        what = f"copy engines copy between the GPUs of one node: this run has {size} processes with device '{device}'."
        yield problem("training.collectives", what, "Use 'auto'.")
    if training.collectives == "copy_engine" and training.shard_degree not in {"auto", place.world_size}:
        what = f"copy engines serve one replica of the model, and shard_degree {training.shard_degree} makes several."
        yield problem("training.collectives", what, "Use 'auto', or shard_degree 'auto'.")


def _torch(run: RunInputs) -> Iterator[Problem]:
    """Check the version of torch that the image lists."""
    training, image = run.training, run.image
    if image is None or run.cluster.runtime == "none":
        return
    found = re.match(r"(\d+)\.(\d+)", image.provided.get("torch", ""))
    is_sharded = run.placement.world_size > 1 and training.engine != "zero3" and training.compute_precision == "bf16"
    has_adapters = is_sharded and training.adapters is not None
    needed = (
        ("method", 8, has_adapters, "sharded adapters need", "set training.engine=zero3"),
        ("tensor_parallel", 9, training.tensor_parallel > 1, "with FSDP2, it needs", "leave it out"),
        ("collectives", 11, training.collectives == "copy_engine", "'copy_engine' needs", "use 'auto'"),
    )
    for key, minor, is_used, what, other in needed:
        if is_used and found and (int(found[1]), int(found[2])) < (2, minor):
            what = f"{what} torch 2.{minor}, and {image.reference} has {image.provided['torch']}."  # noqa: PLW2901
            yield problem(f"training.{key}", what, f"Use an image with torch 2.{minor} or newer, or {other}.")


def _engine(run: RunInputs) -> Iterator[Problem]:
    training = run.training
    if training.engine != "zero3":
        return
    if training.compile == "layers":
        yield problem("training.compile", "'layers' has no effect with engine 'zero3'.", "Use 'auto'.")
    for setting in only_with_fsdp2(training):
        what = f"'{getattr(training, setting)}' is not supported by engine 'zero3'."
        yield problem(f"training.{setting}", what, "Use engine 'auto' or 'fsdp2', or leave it out.")


def _targets(run: RunInputs) -> Iterator[Problem]:
    adapters, shape, counts = run.training.adapters, run.shape, count_model(run.shape)
    key, coefficient = "training.lora.targets", run.training.router_aux_loss_coef
    if coefficient and not counts.experts_per_token:
        what = f"{coefficient:g} weights the load-balancing loss of a mixture of experts: {shape.family} is dense."
        yield problem("training.router_aux_loss_coef", what, "Leave it out, or choose a mixture of experts.")
    elif coefficient and shape.family in WITHOUT_BALANCING_LOSS:
        what = f"a '{shape.family}' has no load-balancing loss: it balances its experts in another way."
        yield problem("training.router_aux_loss_coef", what, "Leave it out.")
    if adapters and "out_proj" in adapters.targets and shape.family in WITHOUT_OUT_PROJ_ADAPTERS:
        yield problem(key, f"out_proj of a {shape.family} can't have adapters: kernels ignore them.", "Leave it out.")
    # Experts may be linear layers in the container's transformers but not in this one, or vice versa.
    if adapters is None or not (shape.is_measured or (counts.is_exact and run.cluster.runtime == "none")):
        return
    of_experts = [name for each in counts.expert_matrices for name in (each.parts or (each.name,))]
    known = list(dict.fromkeys((*(linear.name for linear in counts.linears), *of_experts)))
    accepted = {*known, *(each.name for each in counts.expert_matrices)}
    if unknown := [name for name in adapters.targets if name not in accepted]:
        what = f"{', '.join(unknown)}: {shape.family} has no such projection."
        yield problem(key, what, f"It has {', '.join(known)}.")
    for matrix in counts.expert_matrices:
        if missing := matrix.missing_parts(adapters.targets):
            parts = " and ".join(matrix.parts)
            what = f"{parts} of the experts are adapted together: {', '.join(missing)} is missing."
            yield problem(key, what, "Name all of them, or none.")
        if adapters.use_dora and matrix.num_ranks(adapters.targets):
            what = f"{matrix.name} of the experts has no DoRA, in peft neither."
            fix = "Leave it out, or name other layers in training.lora.targets."
            yield problem("training.lora.use_dora", what, fix)


def _packs(run: RunInputs) -> Iterator[Problem]:
    """Check that each process computes whole packs: all objectives but `next_token` need them."""
    training, objective = run.training, run.training.objective
    if objective == "next_token":
        return
    for key in ("context_parallel", "tensor_parallel"):
        if getattr(training, key) > 1:
            what = f"divides the tokens of a pack among GPUs, which objective '{objective}' does not support yet."
            yield problem(f"training.{key}", what, "Leave it out; use a shorter sequence_length, or offload.")
    if run.recipe.data.packing == "off" and (objective != "kto" or training.stores_reference):
        what = f"'off' would separate the pairs of objective '{objective}', or what its stored reference is of."
        yield problem("data.packing", what, "Use 'auto', and a model that packs.")


def _pictures(run: RunInputs) -> Iterator[Problem]:
    """Check that the model has a vision tower for the data's pictures, and that all settings support pictures."""
    training, data = run.training, run.recipe.data
    if not data.pictures:
        if training.vision != "frozen":
            reason, fix = "the data has none", "Leave it out."
            if data.pictures is None:
                reason, fix = "the first rows can't be read here", "Set data.pictures=true if the data has pictures."
            yield problem("training.vision", f"'{training.vision}' trains on pictures, and {reason}.", fix)
        return
    weights = run.model.weights
    divides = "divides the tokens of a pack among GPUs, which does not support pictures yet."
    stores = training.stores_reference or training.distillation is not None
    refused = (
        (
            run.model.vision is None, "data.pictures",
            f"{weights} has no vision tower, as far as known: there is no 'vision_config'.",
            f"Choose a multimodal model; if it is one: hf download {weights} config.json.",
        ),
        (training.engine == "zero3", "training.engine", "'zero3' trains on no pictures.", "Use 'auto' or 'fsdp2'."),
        (data.packing == "off", "data.packing", "'off' has no pictures: padded rows are of text.", "Use 'auto'."),
        *(
            (getattr(training, key) > 1, f"training.{key}", divides,
             "Leave it out; use a shorter sequence_length, or offload.")
            for key in ("context_parallel", "tensor_parallel")
        ),
        (
            stores, "training.objective",
            f"'{training.objective}' with stored log-probabilities or a teacher does not support pictures yet.",
            "Use method 'lora', whose reference is the model without adapters; or another objective.",
        ),
        (
            training.objective == "kto" and not stores, "training.objective",
            "'kto' pairs prompts with completions of others, and knows prompts by their tokens, without the pictures.",
            "Use pairs and another objective, or rows without pictures.",
        ),
    )  # fmt: skip
    yield from (problem(key, what, fix) for is_refused, key, what, fix in refused if is_refused)


def _teacher(run: RunInputs) -> Iterator[Problem]:
    options, teacher, length = run.training.distillation, run.request.teacher, run.training.sequence_length
    if options is None or teacher is None:
        return
    shape, size = teacher.architecture, run.shape.vocab_size
    if teacher.adapter is not None:
        fix = "Merge them, and give the folder: ftkit export RUN --merge."
        yield problem("training.distill.teacher", f"{options.teacher} has adapters.", fix)
    if length > shape.max_position_embeddings:
        what = f"{length} is longer than the teacher's {shape.max_position_embeddings} positions."
        yield problem("training.sequence_length", what, "Use a shorter one, or another teacher.")
    if options.top_k > (smaller := min(shape.vocab_size, size)):
        yield problem("training.distill.top_k", f"the vocabulary has {smaller} tokens.", f"Use at most {smaller}.")


def _preferences(run: RunInputs) -> Iterator[Problem]:
    training, data, objective = run.training, run.recipe.data, run.training.objective
    if training.preferences is None:
        return
    if data.format.kind not in {"auto", "preferences"} and not (objective == "kto" and label_of(data.format)):
        what = f"'{data.format.kind}' has no {'label' if objective == 'kto' else 'pairs'} for objective '{objective}'."
        yield problem("data.format", what, "Use 'preferences', or omit it.")
    if training.router_aux_loss_coef:
        what = f"the load-balancing loss is a mean over tokens, and that of objective '{objective}' one over samples."
        yield problem("training.router_aux_loss_coef", what, "Leave it out.")
    if training.has_reference and not training.stores_reference and run.model.adapter is not None:
        what = f"{run.model.source} has adapters that continue: without them, the reference would be their base model."
        yield problem("model.weights", what, f"Set training.{objective}.reference=stored.")


# --- Parallelism -----------------------------------------------------------------------------------

_KERNELS_OF_PACKS = {"flash4": "flash-attn-4", "cudnn": "nvidia-cudnn-frontend"}


def _kernels_of_packs(training: TrainingSpec) -> list[str]:
    """Return the packages of which the recipe's attention needs one to divide packs."""
    chosen, kernels = training.attention, dict(_KERNELS_OF_PACKS)
    if training.deterministic:
        del kernels["cudnn"]
    return [package for kernel, package in kernels.items() if chosen not in _KERNELS_OF_PACKS or chosen == kernel]


def why_undivided(run: RunInputs) -> str:
    """Return why no attention kernel can divide packs among GPUs; empty if there is no known reason."""
    training, cluster, image = run.training, run.cluster, run.image
    gpu = GPUS[cluster.gpu] if cluster.gpu else None
    if training.attention == "sdpa" or cluster.device == "cpu":
        return ""
    if gpu is not None and gpu.attention_efficiency(training) is None:
        return f"which this recipe can't use on {gpu.device_name}"
    if image is not None and not any(_lists(run, name) for name in _kernels_of_packs(training)):
        return f"which {image.reference} does not list"
    return ""


def _lists(run: RunInputs, package: str) -> bool:
    """Return whether the image lists a package; also if none is used, whose packages are not known here."""
    return run.image is None or run.cluster.runtime == "none" or package in run.image.listed_packages


def _context_parallel(run: RunInputs) -> Iterator[Problem]:
    key, size, heads = "training.context_parallel", run.training.gpus_per_pack, run.shape.num_attention_heads
    if run.training.context_parallel == 1:
        return
    yield from _groups(run, key, size)
    if has_linear_attention(run.shape):
        yield problem(key, f"layers of a '{run.shape.family}' carry a state from token to token.", "Leave it out.")
    if heads % size:
        product = " for the product with tensor_parallel" if run.training.tensor_parallel > 1 else ""
        what = f"{heads} attention heads of the model can't be divided among {size} GPUs."
        yield problem(key, what, f"Use a divisor of {heads}{product}.")


def _tensor_parallel(run: RunInputs) -> Iterator[Problem]:
    key, size, shape = "training.tensor_parallel", run.training.tensor_parallel, run.shape
    if size == 1:
        return
    yield from _groups(run, key, size)
    if shape.family not in MEASURED:
        what = f"the layers of a '{shape.family}' can't be divided, only those of {', '.join(MEASURED)}."
        yield problem(key, what, "Leave it out.")
        return
    sizes = (shape.num_attention_heads, shape.num_key_value_heads, shape.intermediate_size)
    for name, number in indivisible_sizes(*sizes, size).items():
        yield problem(key, f"{number:,} {name} can't be divided among {size} GPUs.", f"Use a divisor of {number:,}.")
    if run.recipe.evaluation.generation is not None:
        what = "a divided model computes losses, but can't generate completions for the evaluation."
        yield problem(key, what, "Set evaluation.generation to null, and use 'ftkit eval' after training.")


def _shared_prompts(run: RunInputs) -> Iterator[Problem]:
    if run.recipe.data.share_prompts and (reason := why_not_shared(run.recipe, run.shape)):
        yield problem("data.share_prompts", f"can't be true: {reason}.", "Leave it out.")


def _groups(run: RunInputs, key: str, size: int) -> Iterator[Problem]:
    per_node, training = run.placement.processes_per_node, run.training
    if family_of(run.shape.family).has_sinks:
        what = f"no attention kernel that divides packs can compute the attention sinks of '{run.shape.family}'."
        yield problem(key, what, "Leave it out.")
    elif reason := why_undivided(run):
        fix = "Use an image with it ('ftkit images') on Hopper or newer, in bf16; or training.attention=sdpa."
        yield problem(key, f"needs {' or '.join(_kernels_of_packs(training))}, {reason}.", fix)
    if per_node % size:
        what = f"{per_node} GPUs of a node can't be divided into groups of {size}."
        product = " for the product with tensor_parallel" * (size > getattr(training, key.removeprefix("training.")))
        yield problem(key, what, f"Use a divisor of {per_node}{product}, or another --gpus-per-node.")
    if run.recipe.data.packing == "off":
        yield problem(key, "divides the tokens of packs, and data.packing is 'off'.", "Use data.packing 'auto'.")


def _fp8(run: RunInputs) -> Iterator[Problem]:
    training, gpu = run.training, run.cluster.gpu
    if not training.fp8_all_gather and training.precision != "fp8":
        what = f"has no effect with precision '{training.precision}': only 'fp8' all-gathers in FP8."
        yield problem("training.fp8_all_gather", what, "Leave it out.")
    if not training.multiplies_in_fp8:
        return
    key = "training.precision" if training.trains_in_fp8 else "training.base_precision"
    fix = f"Leave {key} out."
    if gpu is not None and not GPUS[gpu].has_fp8:
        what = f"{GPUS[gpu].device_name} does not multiply in FP8; Ada, Hopper and newer GPUs do."
        yield problem(key, what, fix)
    if gpu is not None and not GPUS[gpu].has_fast_attention and quantized_experts(run.shape, training):
        yield problem(key, f"FP8 experts need Hopper or newer, and the cluster has {GPUS[gpu].device_name}.", fix)
    counts = count_model(run.shape)
    sizes = [(each.inputs, each.outputs) for each in counts.linears if each.name not in ROUTERS]
    if not training.trains_in_fp8:  # trained experts are in bf16
        sizes += [(each.inputs, each.outputs) for each in counts.expert_matrices]
    # Estimated counts may lack some matrices.
    if counts.is_exact and not any(inputs % FP8_MULTIPLE == outputs % FP8_MULTIPLE == 0 for inputs, outputs in sizes):
        what = "has no effect on this model: no linear layer of its decoder layers has inputs and outputs that are "
        yield problem(key, f"{what}multiples of {FP8_MULTIPLE}, as FP8 needs.", fix)
