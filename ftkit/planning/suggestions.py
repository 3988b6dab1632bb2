"""Suggest changes that make a run fit, or make it faster, and note what is unusual about its settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations, product
from typing import TYPE_CHECKING, NamedTuple

from pydantic import ValidationError

from ftkit.config.objectives import ENTRY_BYTES
from ftkit.config.training import TrainingPlan
from ftkit.errors import MemoryExhaustedError
from ftkit.planning import choices
from ftkit.planning.fit import Fit
from ftkit.planning.step_time import predict_forward_hours, predict_step_time, vision_seconds
from ftkit.planning.training_setup import teacher_setup

if TYPE_CHECKING:
    from ftkit.config.cluster import ClusterProfile
    from ftkit.config.training import TrainingSpec
    from ftkit.planning.plan import RunPlan
    from ftkit.planning.training_checks import RunInputs
    from ftkit.planning.training_setup import Gpu, Setup

NUM_SUGGESTIONS = 3
SHORTEST = 512  # minimum tokens of a pack in suggestions: shorter packs are not useful
_MANY_EPOCHS = 30
_LARGE_SHARE = 0.3  # fraction of a step in the vision tower from which a note advises smaller pictures
CERTAINLY_TOO_LARGE = 2.0  # a run is refused if its predicted memory exceeds this multiple of the available memory

Change = dict[str, object]  # fields of `training`, or `num_nodes`, with their new values


class Suggestion(NamedTuple):
    """An override to type after a recipe, with the predicted memory of a process and, if faster, the speed-up."""

    override: str
    total_gib: float
    speedup: float | None = None

    def __str__(self) -> str:
        faster = "at least " if self.speedup is None else f"{self.speedup:.1f} times as fast, "
        return f"{self.override} ({faster}{self.total_gib:.1f} GiB)"


def suggest_changes(
    setup: Setup, cluster: ClusterProfile, room_gib: float, is_possible: Callable[[Change], bool] | None = None
) -> list[Suggestion]:
    """Return up to `NUM_SUGGESTIONS` mildest changes of a setup that are predicted to fit: single ones, then combined.

    `room_gib` is the memory for a process's tensors. `is_possible` tells whether the run may have a change; without it,
    packs are not divided.
    """
    run = _Run(setup, cluster, is_possible)
    found = _mildest_changes(run.knobs(), lambda change: run.fit(change).on_gpu(room_gib) and run.is_valid(change))
    return [Suggestion(_format_override(change), run.fit(change).memory.total) for change in found]


def suggest_for(plan: RunPlan, room_gib: float, *, has_begun: bool = False) -> list[Suggestion]:
    """Return the changes of a plan that are predicted to fit; once it `has_begun`, a teacher needs no memory."""
    setup = replace(plan.setup, teacher=None) if has_begun else plan.setup
    fixed = {"context_parallel"} | ({"method"} if plan.recipe.model.added_tokens else set())
    return suggest_changes(setup, plan.cluster, room_gib, fixed.isdisjoint)


def check_host_memory(plan: RunPlan, node_gib: float | None, owner: str) -> list[str]:
    """Check that a node has room for the offloaded tensors; return a warning if it probably has not.

    `owner` describes the node in messages; `node_gib` is None if unknown. Raises `MemoryExhaustedError` if it has less
    than half of the predicted memory.
    """
    memory, training = plan.host_memory, plan.recipe.training
    if memory is None or node_gib is None or memory.total <= node_gib:
        return []
    keys = ["training.activation_offload=false"] if training.activation_offload else []
    keys += ["training.offload=none"] if training.offload != "none" else []
    what = (
        f"without {' and '.join(keys)}, the run is predicted to need about {memory.total:,.0f} GiB of host memory per "
        f"node, {owner} has {node_gib:,.0f} GiB"
    )
    fix = "set one of these, a smaller micro_batch_size or sequence_length; or use nodes with more memory"
    if memory.total > CERTAINLY_TOO_LARGE * node_gib:
        raise MemoryExhaustedError(what, meaning="the kernel would end the job's processes without a message", fix=fix)
    return [f"{what}: the kernel may end the job's processes without a message; {fix}"]


def _mildest_changes(knobs: Iterable[list[Change]], fits: Callable[[Change], bool]) -> list[Change]:
    """Return the mildest changes that fit: of one knob, and of several if those are fewer than `NUM_SUGGESTIONS`."""
    knobs = [knob for knob in knobs if knob]
    found: list[Change] = []
    used: list[set[int]] = []
    for size in range(1, len(knobs) + 1):
        for chosen in combinations(range(len(knobs)), size):
            if len(found) == NUM_SUGGESTIONS:
                return found
            if any(earlier <= set(chosen) for earlier in used):
                continue  # a milder value suffices
            if not fits(_merge(knobs[index][-1] for index in chosen)):
                continue  # milder values don't fit either
            mildest = (_merge(changes) for changes in product(*(knobs[index] for index in chosen)))
            found.append(next(change for change in mildest if fits(change)))
            used.append(set(chosen))
    return found


def _merge(changes: Iterable[Change]) -> Change:
    return {field: value for each in changes for field, value in each.items()}


def suggest_faster(wanted: TrainingSpec, setup: Setup, gpu: Gpu) -> Suggestion | None:
    """Return the micro-batch size and checkpointing with the shortest step for the same global batch.

    The settings must fit the GPU, but need not leave memory to spare. Returns None if the speed-up is not `WORTHWHILE`.
    Activations are offloaded only if the speed-up over the best settings without it is. The override also has the
    values that the recipe (`wanted`) leaves to `auto`, which would otherwise be chosen again.
    """

    def find_fastest(setup: Setup) -> choices.Option | None:
        sizes, room_gib = choices.micro_batch_sizes(setup, choices.MOST_TOKENS), choices.ROOM * gpu.usable_gib
        return choices.fastest_option(
            choices.possible_options(setup, gpu, sizes, choices.TRIED, room_gib), gpu.usable_gib
        )

    best = find_fastest(setup)
    can_offload = not setup.training.activation_offload and setup.engine == "fsdp2"
    # Without checkpointing, there is no recomputation for offloading to replace.
    if best is not None and best.training.activation_checkpointing != "none" and can_offload:
        other = find_fastest(setup.with_training(activation_offload=True))
        if other is not None and other.step_seconds * choices.WORTHWHILE < best.step_seconds:
            best = other if choices.fits_host(replace(setup, training=other.training), gpu) else best
    speedup = 0.0 if best is None else choices.speedup(setup, replace(setup, training=best.training), gpu)
    if best is None or speedup < choices.WORTHWHILE:
        return None
    fields = (*choices.OPEN, "activation_offload", "checkpointed_layers", "offloaded_layers")
    values = {field: getattr(best.training, field) for field in fields}
    changed = {field: value for field, value in values.items() if value != getattr(wanted, field)}
    if changed.keys() - {"micro_batch_size"}:  # the others need a mode in the recipe
        changed = {"activation_checkpointing": best.training.activation_checkpointing} | changed
    return Suggestion(_format_override(changed), best.total_gib, speedup)


class _Run(NamedTuple):
    """A setup and its knobs: each is a list of changes, mildest first."""

    setup: Setup
    cluster: ClusterProfile
    is_possible: Callable[[Change], bool] | None = None

    def is_valid(self, change: Change) -> bool:
        """Return whether a recipe, and this run, may have the changed settings."""
        fields = {field: value for field, value in change.items() if field != "num_nodes"}
        try:
            TrainingPlan.model_validate(self.setup.training.model_dump() | fields)
        except ValidationError:
            return False
        return self.is_possible is None or self.is_possible(change)

    def fit(self, change: Change) -> Fit:
        """Return the predictions after a change. With `auto`, layers are resharded, as memory is short."""
        setup, fields = replace(self.setup, num_replicas=1), dict(change)
        num_processes = self.setup.num_processes
        if fields.pop("num_nodes", None):
            setup, num_processes = replace(setup, num_nodes=2 * setup.num_nodes), 2 * num_processes
        if num_processes > 1:
            setup = replace(setup, gpu=None)
        return Fit(choices.with_sharding(replace(setup, num_shards=num_processes).with_training(**fields)))

    def knobs(self) -> Iterator[list[Change]]:
        """Yield the knobs for a GPU's memory, cheapest first."""
        training = self.setup.training
        if training.reshard_after_forward == "never":
            yield [{"reshard_after_forward": "auto"}]
        if training.sync_gradients == "last_micro_batch":
            yield [{"sync_gradients": "auto"}]
        if training.shard_degree != "auto":
            yield [{"shard_degree": "auto"}]
        yield self._checkpointing()
        micro = training.micro_batch_size  # its divisors keep the global batch
        yield [{"micro_batch_size": size} for size in range(micro - 1, 0, -1) if micro % size == 0]
        yield self._context_parallel()
        yield self._optimizer_states()
        lengths = [training.sequence_length]
        while lengths[-1] % 2 == 0 and lengths[-1] // 2 >= SHORTEST:
            lengths.append(lengths[-1] // 2)
        yield [{"sequence_length": length} for length in lengths[1:]]
        # Twice the nodes, if the cluster has that many and they can divide the global batch.
        twice, cluster = 2 * self.setup.num_nodes, self.cluster
        has_nodes = cluster.scheduler != "local" and (cluster.max_nodes is None or twice <= cluster.max_nodes)
        if has_nodes and training.global_batch_size % (micro * 2 * self.setup.num_data_ranks) == 0:
            yield [{"num_nodes": twice}]
        lighter = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}[training.method]
        in_bf16: Change = {"precision": "bf16"} if training.trains_in_fp8 else {}
        in_bf16 |= {"base_precision": "auto"} if training.base_precision != "auto" else {}
        can_change = [value for value in lighter if value == "lora" or training.tensor_parallel == 1]
        yield [{"method": value} | in_bf16 for value in can_change]

    def _fits_host(self, change: Change) -> bool:
        node_gib = self.cluster.memory_per_node_gib
        return self.cluster.device != "cpu" and (node_gib is None or self.fit(change).on_host(node_gib))

    def _checkpointing(self) -> list[Change]:
        """Return the changes to stronger modes in all layers, and to offloading the inputs of layers."""
        training, order = self.setup.training, choices.MODES.index
        first = order(training.activation_checkpointing) + (training.checkpointed_layers is None)
        modes = ("selective", "full") if self.setup.engine == "fsdp2" else ("full",)
        stronger = [mode for mode in modes if order(mode) >= first]
        changes: list[Change] = [{"activation_checkpointing": mode, "checkpointed_layers": None} for mode in stronger]
        offload: Change = {"activation_checkpointing": "full", "checkpointed_layers": None, "activation_offload": True}
        if not training.activation_offload and self._fits_host(offload):
            changes.append(offload)
        return [
            {field: value for field, value in change.items() if value != getattr(training, field)} for change in changes
        ]

    def _context_parallel(self) -> list[Change]:
        setup, training = self.setup, self.setup.training
        if not (self.is_possible and setup.engine == "fsdp2" and setup.shape.is_measured):
            return []
        per_node, heads = setup.num_processes // setup.num_nodes, setup.shape.num_attention_heads
        most = math.gcd(per_node, heads, training.sequence_length)
        sizes = range(training.context_parallel + 1, most // training.tensor_parallel + 1)
        return [{"context_parallel": size} for size in sizes if most % (size * training.tensor_parallel) == 0]

    def _optimizer_states(self) -> list[Change]:
        """Return the changes of optimizer and offload; 8-bit states and offload exclude each other.

        8-bit states come first: rounding them costs no time, but copying states from host memory does in each step. The
        states of adapters are too small to matter.
        """
        training = self.setup.training
        stays = training.optimizer == "adamw" and training.offload == "none"
        has_8_bits = stays and self.setup.engine == "fsdp2" and training.adapters is None
        stronger = {"none": ("optimizer", "all"), "optimizer": ("all",), "all": ()}[training.offload]
        if training.tensor_parallel > 1:  # incompatible with offload
            stronger = ()
        whole: Change = {} if training.optimizer == "adamw" else {"optimizer": "adamw"}
        offloads = [whole | {"offload": value} for value in stronger]
        first: list[Change] = [{"optimizer": "adamw8bit"}] if has_8_bits else []
        return first + [change for change in offloads if self._fits_host(change)]


def _format_override(change: Mapping[str, object]) -> str:
    words = {field: "null" if value is None else str(value).lower() for field, value in change.items()}
    return " ".join(
        f"--nodes {value}" if field == "num_nodes" else f"training.{field}={value}" for field, value in words.items()
    )


def notes_on_pictures(run: RunInputs, setup: Setup) -> Iterator[str]:
    """Yield what is not known of the pictures, and advice if they take most of a pack or much of a step."""
    length, vision = run.training.sequence_length, run.shape.vision
    if run.model.vision is not None and run.recipe.data.pictures is None:
        yield "the first rows can't be read here: set data.pictures=true if they have pictures, which are refused else"
    if vision is None:
        return
    if not vision.layers:
        yield "memory and time of the vision tower are not planned: its config.json lacks them, and torch is not here"
        return
    if not vision.tokens:
        what = "activations and time of the vision tower are not planned"
        yield f"{what}: the size of pictures is not known, which preprocessor_config.json sets"
        return
    what = "memory and time" if vision.is_counted else "parameters, memory, and time"
    yield f"{what} of the vision tower are estimates, for packs full of the processor's largest pictures"
    fix = "if the model takes other sizes, preprocessor_config.json sets them: half the sides, a quarter of the tokens"
    if 2 * vision.tokens > length:
        yield f"a picture takes up to {vision.tokens:,} of a pack's {length:,} tokens; {fix}"
    if setup.gpu is not None:
        share = setup.tokens * vision_seconds(setup, setup.gpu) * setup.num_micro_batches
        share /= predict_step_time(setup, setup.gpu).step_seconds
        if share > _LARGE_SHARE:
            yield f"the vision tower takes up to {share:.0%} of a step; {fix}"


def notes_on_settings(run: RunInputs) -> Iterator[str]:
    """Yield unset keys that most recipes set, keys that change nothing here, and values that are often typos."""
    given = run.request.origins.recipe.values
    keys = given.get("training") or {}
    names = [name for name in ("sequence_length", "global_batch_size", "learning_rate") if name not in keys]
    names += [] if {"max_steps", "num_epochs"} & keys.keys() else ["num_epochs"]
    if given and names:
        names = [name for name in ("method", *names) if name not in keys]
        defaults = ", ".join(f"{name}: {getattr(run.training, name)}" for name in names)
        yield f"(default) {defaults}; the recipe does not set {'it' if len(names) == 1 else 'them'}"
    training, adapters, width = run.training, run.training.adapters, run.shape.hidden_size
    yield from _notes_on_keys_without_effect(run)
    if adapters is not None and adapters.rank > width:
        yield f"training.lora.rank={adapters.rank:,} is more than the model's width, {width:,}: usual are 8 to 128"
    if run.recipe.model.weights == "random":
        return  # how fast new weights learn depends on their size
    highest, usual = (3e-4, "1e-6 to 1e-4") if adapters is None else (3e-3, "5e-5 to 5e-4")
    how = "full fine-tuning" if adapters is None else "adapters"
    if training.preferences is not None:
        highest, usual = (3e-5, "1e-7 to 1e-5") if adapters is None else (3e-4, "1e-6 to 1e-4")
        how = f"{training.objective} of {'all weights' if adapters is None else 'adapters'}"
    if training.learning_rate > highest:
        yield f"training.learning_rate={training.learning_rate:g} is high: usual for {how} are {usual}"
    if training.num_epochs is not None and training.num_epochs > _MANY_EPOCHS:
        yield f"training.num_epochs={training.num_epochs:,} is high: usual are 1 to 5; a pretrained model overfits"


def _notes_on_keys_without_effect(run: RunInputs) -> Iterator[str]:
    training, evaluation = run.training, run.recipe.evaluation
    if run.cluster.scheduler == "local" and run.recipe.resources.time_limit is not None:
        yield f"resources.time_limit has no effect on cluster '{run.cluster.name}', which has no Slurm"
    if training.schedule == "constant" and training.min_learning_rate_ratio:
        yield "training.min_learning_rate_ratio has no effect with schedule 'constant'"
    every, kept = training.checkpoint_every_steps, training.keep_every_steps
    if kept is not None and kept % every:
        both = math.lcm(kept, every)
        yield (
            f"training.keep_every_steps={kept:,} is no multiple of checkpoint_every_steps ({every:,}): of its steps, "
            f"only {both:,}, {2 * both:,}, … have checkpoints"
        )
    between, patience = evaluation.every_steps, evaluation.early_stopping_patience
    if patience and between and training.max_steps and (patience + 1) * between >= training.max_steps:
        needed = f"{patience + 1:,} evaluations, the first to compare with, one every {between:,} steps"
        yield f"evaluation.early_stopping_patience={patience:,} can't end training early: that takes {needed}"


def notes_on_forwards(run: RunInputs, setup: Setup) -> Iterator[str]:
    """Yield the cost of computing a teacher's distributions or the reference's log-probabilities before step 1."""
    options, request, gpu = run.training.distillation, run.request, setup.gpu
    tokens = (1_000_000, 1_000_000) if request.num_targets is None else (request.num_tokens or 0, request.num_targets)
    per = "per million trained tokens" if request.num_targets is None else "once for all runs with this data"
    teacher = teacher_setup(setup)
    if teacher is not None and options is not None:
        parts = [f"{tokens[1] * (options.top_k + 1) * ENTRY_BYTES / 2**30:.2g} GiB next to the data"]
        if gpu is not None:
            parts.append(f"about {predict_forward_hours(teacher, gpu, tokens[0]):.2g} GPU hours before step 1")
        yield f"teacher {options.teacher}: {' and '.join(parts)}, {per}"
    elif run.training.stores_reference and gpu is not None:
        passes = 2 if run.training.objective == "kto" else 1  # also of mismatched completions
        hours = passes * predict_forward_hours(setup, gpu, tokens[0])
        yield f"reference: log-probabilities take about {hours:.2g} GPU hours before step 1, {per}"
