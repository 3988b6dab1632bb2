"""Suggest changes that make a run fit, or make it faster."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

from ftkit.config.cluster import ClusterProfile
from ftkit.errors import MemoryExhaustedError
from ftkit.planning.choices import (
    MODES,
    MOST_TOKENS,
    OPEN,
    ROOM,
    TRIED,
    WORTHWHILE,
    Option,
    fastest_option,
    fits_host,
    micro_batch_sizes,
    possible_options,
    predict_option,
    with_sharding,
)
from ftkit.planning.fit import fit
from ftkit.planning.training_setup import Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ftkit.config.training import ActivationCheckpointing, TrainingPlan
    from ftkit.planning.fit import Fit
    from ftkit.planning.plan import RunPlan
    from ftkit.planning.training_setup import Gpu

NUM_SUGGESTIONS = 3
SHORTEST = 512
"""Minimum tokens of a pack in suggestions: shorter packs are not useful."""

CERTAINLY_TOO_LARGE = 2.0
"""A run is refused if its predicted memory exceeds this multiple of the available memory."""

Change = dict[str, Any]
"""Fields of `training`, or `num_nodes`, with their new values."""


@dataclass(frozen=True)
class Suggestion:
    """An override to type after a recipe, with the predicted memory of a process and, if it is faster, the speed-up."""

    override: str
    total_gib: float
    speedup: float | None = None

    def __str__(self) -> str:
        faster = "" if self.speedup is None else f"{self.speedup:.1f} times as fast, "
        return f"{self.override} ({faster}{self.total_gib:.1f} GiB)"


def suggest_changes(
    setup: Setup, cluster: ClusterProfile, room_gib: float, *, can_divide_packs: bool = False
) -> list[Suggestion]:
    """Return the mildest changes that would fit: single ones if there are three, else also combinations.

    Args:
        setup: the setup that does not fit.
        cluster: the run's cluster, which decides whether there are more nodes, and whether offloading is possible.
        room_gib: available memory for a process's tensors, in GiB.
        can_divide_packs: whether documents are packed, and attention has a kernel that can divide them.
    """
    run = _Run(setup, cluster, can_divide_packs)
    found = _mildest_changes(run.knobs(), lambda change: run.fit(change).on_gpu(room_gib))
    return [Suggestion(_format_override(change), run.fit(change).memory.total) for change in found]


def suggest_less_host_memory(setup: Setup, cluster: ClusterProfile, node_gib: float) -> list[str]:
    """Return the overrides that would fit the memory of a node, and still the GPU if its memory is known."""
    run, room_gib = _Run(setup, cluster), math.inf if setup.gpu is None else setup.gpu.usable_gib

    def fits(change: Change) -> bool:
        found = run.fit(change)
        return found.on_host(node_gib) and found.on_gpu(room_gib)

    found = _mildest_changes(run.host_knobs(), fits)
    return [_format_override(change) for change in found]


def check_host_memory(plan: RunPlan, node_gib: float | None, owner: str) -> list[str]:
    """Check that a node has room for what the run offloads.

    Args:
        plan: the plan, with its predicted host memory.
        node_gib: memory of the node, in GiB; None if unknown.
        owner: description of the node, for messages.

    Returns:
        A warning if it probably has no room.

    Raises:
        MemoryExhaustedError: it has less than half of the predicted memory.
    """
    memory = plan.host_memory
    if memory is None or node_gib is None or memory.total <= node_gib:
        return []
    training = plan.recipe.training
    keys = ["training.activation_offload"] if training.activation_offload else []
    keys += [f"training.offload={training.offload}"] if training.offload != "none" else []
    what = (
        f"with {' and '.join(keys)}, the run is predicted to need about {memory.total:,.0f} GiB of host memory per "
        f"node, {owner} has {node_gib:,.0f} GiB"
    )
    fitting = suggest_less_host_memory(plan.setup, plan.cluster, node_gib)
    fix = f"would fit: {'; '.join(fitting)}" if fitting else "use nodes with more memory, or a shorter sequence_length"
    if memory.total > CERTAINLY_TOO_LARGE * node_gib:
        raise MemoryExhaustedError(what, meaning="the kernel would end the job's processes without a message", fix=fix)
    return [f"{what}: the kernel may end the job's processes without a message; {fix}"]


def _mildest_changes(choices: Iterable[list[Change]], fits: Callable[[Change], bool]) -> list[Change]:
    """Return the mildest changes that fit: of one knob if there are `NUM_SUGGESTIONS`, else also of several."""
    knobs = [knob for knob in choices if knob]
    found: list[Change] = []
    used: list[set[int]] = []
    for size in range(1, len(knobs) + 1):
        for chosen in combinations(range(len(knobs)), size):
            if len(found) == NUM_SUGGESTIONS:
                return found
            if any(earlier <= set(chosen) for earlier in used):
                continue  # a milder value suffices
            if not fits(_merge_changes(knobs[index][-1] for index in chosen)):
                continue  # milder values don't fit either
            for changes in product(*(knobs[index] for index in chosen)):
                change = _merge_changes(changes)
                if fits(change):
                    found.append(change)
                    used.append(set(chosen))
                    break
    return found


def _merge_changes(changes: Iterable[Change]) -> Change:
    return {field: value for each in changes for field, value in each.items()}


def suggest_faster(setup: Setup, gpu: Gpu) -> Suggestion | None:
    """Return the micro-batch and the checkpointing for the shortest step with the same global batch.

    The settings must fit the GPU, though without memory to spare. Returns None if the speed-up is not worthwhile.
    Activations are offloaded only if that is worthwhile beside the best without it.
    """
    now = predict_option(setup, gpu).step_seconds
    best = _fastest(setup, gpu)
    offloading = setup.with_training(activation_offload=True)
    if (
        best is not None
        and best.training.activation_checkpointing != "none"  # else copies have nothing to save
        and not setup.training.activation_offload
        and setup.engine == "fsdp2"
    ):
        other = _fastest(offloading, gpu)
        if other is not None and other.step_seconds * WORTHWHILE < best.step_seconds:
            best = other if fits_host(replace(setup, training=other.training), gpu) else best
    if best is None or now <= best.step_seconds * WORTHWHILE:
        return None
    fields = [*OPEN, "activation_offload", "checkpointed_layers", "offloaded_layers"]
    changed = {
        field: getattr(best.training, field)
        for field in fields
        if getattr(best.training, field) != getattr(setup.training, field)
    }
    if {*fields[-2:]} & {*changed}:  # a number alone needs a mode in the recipe
        changed = {"activation_checkpointing": best.training.activation_checkpointing} | changed
    return Suggestion(_format_override(changed), best.total_gib, now / best.step_seconds)


def _fastest(setup: Setup, gpu: Gpu) -> Option | None:
    options = possible_options(setup, gpu, micro_batch_sizes(setup, MOST_TOKENS), TRIED, ROOM * gpu.usable_gib)
    return fastest_option(options, gpu.usable_gib)


@dataclass(frozen=True)
class _Run:
    """The setup to change."""

    setup: Setup
    cluster: ClusterProfile
    can_divide_packs: bool = False

    @property
    def training(self) -> TrainingPlan:
        return self.setup.training

    def fit(self, change: Change) -> Fit:
        """Return the predictions after a change."""
        fields, setup = dict(change), replace(self.setup, gpu=None)  # without spare memory, layers are resharded
        num_nodes = fields.pop("num_nodes", setup.num_nodes)
        num_processes = num_nodes * setup.num_processes // setup.num_nodes
        whole = replace(setup, num_nodes=num_nodes, num_shards=num_processes, num_replicas=1)
        return fit(with_sharding(whole.with_training(**fields)))

    def knobs(self) -> Iterator[list[Change]]:
        """Yield the knobs, cheapest first: for each, its possible changes, mildest first."""
        training = self.training
        if training.reshard_after_forward == "never":
            yield [{"reshard_after_forward": "auto"}]
        if training.sync_gradients == "last_micro_batch":
            yield [{"sync_gradients": "auto"}]
        if training.shard_degree != "auto":
            yield [{"shard_degree": "auto"}]
        yield self._checkpointing()
        yield [{"micro_batch_size": size} for size in _smaller_divisors(training.micro_batch_size)]
        yield self._context_parallel()
        yield self._optimizer_states()
        yield [{"sequence_length": length} for length in _halves(training.sequence_length)]
        yield self._more_nodes()
        lighter = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}[training.method]
        yield [{"method": value} for value in lighter if value == "lora" or training.tensor_parallel == 1]

    def host_knobs(self) -> Iterator[list[Change]]:
        """Yield the knobs that take less host memory, as `knobs` does."""
        training = self.training
        if training.activation_offload:
            yield [{"activation_checkpointing": "full"}]
            number: Change = {} if training.offloaded_layers is None else {"offloaded_layers": None}
            yield [number | {"activation_offload": False}]
        if training.offload != "none":
            yield from ([{"offload": value}] for value in ("optimizer", "none") if value != training.offload)
            yield self._more_nodes()
        yield [{"micro_batch_size": size} for size in _smaller_divisors(training.micro_batch_size)]
        yield [{"sequence_length": length} for length in _halves(training.sequence_length)]

    def _fits_host(self, change: Change) -> bool:
        node_gib = self.cluster.memory_per_node_gib
        return self.cluster.device != "cpu" and (node_gib is None or self.fit(change).on_host(node_gib))

    def _checkpointing(self) -> list[Change]:
        """Return the changes to stronger modes, each in a quarter, half, three quarters or all of the layers."""
        training, total = self.training, self.setup.shape.num_hidden_layers
        parts = sorted({max(1, total * quarters // 4) for quarters in (1, 2, 3)} - {total})
        steps: list[tuple[ActivationCheckpointing, int | None, bool]] = [
            *(("selective", num, False) for num in (*parts, None) if self.setup.engine == "fsdp2"),
            *(("full", num, False) for num in (*parts, None)),
        ]
        offload: Change = {"activation_checkpointing": "full", "checkpointed_layers": None, "activation_offload": True}
        if self._fits_host(offload):
            steps.append(("full", None, True))
        fields = ("activation_checkpointing", "checkpointed_layers", "activation_offload")
        now = tuple(getattr(training, field) for field in fields)

        def strength(mode: ActivationCheckpointing, num: int | None, offload: bool) -> tuple[bool, int, int]:  # noqa: FBT001
            return offload, MODES.index(mode), num or total

        return [
            {field: value for field, value, old in zip(fields, step, now, strict=True) if value != old}
            | ({"activation_checkpointing": step[0]} if step[1] else {})  # a number alone needs a mode in the recipe
            for step in steps
            if strength(*step) > strength(*now)
        ]

    def _context_parallel(self) -> list[Change]:
        """Return the changes that divide packs among more GPUs of a node."""
        setup, training = self.setup, self.training
        if not (self.can_divide_packs and setup.engine == "fsdp2" and setup.shape.is_measured):
            return []
        per_node, heads = setup.num_processes // setup.num_nodes, setup.shape.num_attention_heads
        most = math.gcd(per_node, heads, training.sequence_length)
        sizes = range(training.context_parallel + 1, most // training.tensor_parallel + 1)
        return [{"context_parallel": size} for size in sizes if most % (size * training.tensor_parallel) == 0]

    def _optimizer_states(self) -> list[Change]:
        """Return the changes of optimizer and offload: 8-bit states and offload exclude each other.

        8-bit states come first, because rounding them costs no time, while fetching them from host memory does in each
        step. The states of adapters are too small to matter.
        """
        training = self.training
        stays = training.optimizer == "adamw" and training.offload == "none"
        has_8_bits = stays and self.setup.engine == "fsdp2" and training.adapters is None
        stronger = {"none": ("optimizer", "all"), "optimizer": ("all",), "all": ()}[training.offload]
        if training.tensor_parallel > 1:  # incompatible with offload
            stronger = ()
        whole: Change = {} if training.optimizer == "adamw" else {"optimizer": "adamw"}
        return ([{"optimizer": "adamw8bit"}] if has_8_bits else []) + [
            whole | {"offload": value} for value in stronger if self._fits_host(whole | {"offload": value})
        ]

    def _more_nodes(self) -> list[Change]:
        """Return the change to twice the nodes, if the cluster has them and they can divide the global batch."""
        twice = 2 * self.setup.num_nodes
        training, cluster = self.training, self.cluster
        at_once = training.micro_batch_size * 2 * self.setup.num_data_ranks
        enough = cluster.scheduler != "local" and (cluster.max_nodes is None or twice <= cluster.max_nodes)
        return [{"num_nodes": twice}] if enough and training.global_batch_size % at_once == 0 else []


def _smaller_divisors(number: int) -> list[int]:
    """Return the divisors of a number below itself, largest first: as micro-batches, they keep the global batch."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)} - {number}, reverse=True)


def _halves(length: int) -> list[int]:
    halves = []
    while length % 2 == 0 and length // 2 >= SHORTEST:
        length //= 2
        halves.append(length)
    return halves


def _format_override(change: Change) -> str:
    """Format a change as an override."""
    words = {field: "null" if value is None else str(value).lower() for field, value in change.items()}
    return " ".join(
        f"--nodes {value}" if field == "num_nodes" else f"training.{field}={value}" for field, value in words.items()
    )
