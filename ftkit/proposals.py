"""What could be changed in a run so that, by prediction, it fits the memory of its devices."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, Literal

from ftkit.engine_choice import keeps_weights
from ftkit.memory import predict_memory
from ftkit.specs.cluster import ClusterProfile
from ftkit.specs.recipe import RecipeSpec
from ftkit.specs.training import EngineName
from ftkit.speed import predict_speed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.gpus import Gpu
    from ftkit.speed import Network

NUM_PROPOSALS = 3
SHORTEST = 512
"""Tokens; nobody trains on shorter packs for memory's sake."""

WORTHWHILE = 1.1
"""Speed-up from which on a change is proposed: predictions are off by as much."""
LEAST_DIFFERENCE = 1.02
"""Speed-up over a smaller micro-batch that is worth a larger one."""

Change = dict[str, Any]
"""Fields of `training` with their new values, or `num_nodes` with its."""


@dataclass(frozen=True)
class Proposal:
    """A change as it is typed after a recipe, and the memory of a process that is predicted for it."""

    override: str
    total_gib: float

    def __str__(self) -> str:
        return f"{self.override} ({self.total_gib:.1f} GiB)"


def propose_changes(
    recipe: RecipeSpec,
    cluster: ClusterProfile,
    num_nodes: int,
    processes_per_node: int,
    engine: EngineName,
    room_gib: float,
) -> list[Proposal]:
    """Return the mildest changes that would fit: each alone if three do, else together with others.

    Args:
        recipe: the recipe that does not fit.
        cluster: where it runs; decides whether there are more nodes and whether there is something to offload from.
        num_nodes: as planned.
        processes_per_node: as planned.
        engine: as planned.
        room_gib: what a process's tensors may take.
    """
    run = _Run(recipe, cluster, num_nodes, processes_per_node, engine)
    levers = [lever for lever in run.levers() if lever]
    found: list[Proposal] = []
    used: list[set[int]] = []
    for size in range(1, len(levers) + 1):
        for chosen in combinations(range(len(levers)), size):
            if len(found) == NUM_PROPOSALS:
                return found
            if any(earlier <= set(chosen) for earlier in used):
                continue  # less is enough
            for changes in product(*(levers[index] for index in chosen)):
                change = {field: value for each in changes for field, value in each.items()}
                total = run.predict(change)
                if total <= room_gib:
                    found.append(Proposal(_typed(change), total))
                    used.append(set(chosen))
                    break
    return found


@dataclass(frozen=True)
class FasterProposal:
    """Changes that would make a run faster and still fit, as they are typed after a recipe.

    Attributes:
        override: what is typed.
        speedup: how many times as fast.
        total_gib: predicted memory of a process.
    """

    override: str
    speedup: float
    total_gib: float

    def __str__(self) -> str:
        return f"{self.override} ({self.speedup:.1f} times as fast, {self.total_gib:.1f} GiB)"


def propose_faster(recipe: RecipeSpec, engine: EngineName, gpu: Gpu, network: Network) -> FasterProposal | None:
    """Return the micro-batch and the checkpointing with which the same global batch takes the least time.

    Only what fits the GPU and is worth a change.
    """
    shape, training = recipe.model.architecture, recipe.training
    per_process = training.global_batch_size // network.size
    kept = keeps_weights(shape, training, network.size, engine, gpu)
    now = predict_speed(shape, training, engine, gpu, network, keeps_weights=kept).step_seconds
    best: FasterProposal | None = None
    for micro, checkpointing in product(_divisors(per_process), ("none", "selective", "full")):
        change: Change = {"micro_batch_size": micro, "activation_checkpointing": checkpointing}
        change = {field: value for field, value in change.items() if value != getattr(training, field)}
        if (checkpointing == "selective" and engine != "fsdp2") or (
            checkpointing != "full" and training.activation_offload
        ):
            continue
        changed = training.model_copy(update=change)
        kept = keeps_weights(shape, changed, network.size, engine, gpu)
        total = predict_memory(shape, changed, network.size, engine, keeps_weights=kept).total
        speedup = now / predict_speed(shape, changed, engine, gpu, network, keeps_weights=kept).step_seconds
        if total <= gpu.usable_gib and speedup > (best.speedup * LEAST_DIFFERENCE if best else WORTHWHILE):
            best = FasterProposal(_typed(change), speedup, total)
    return best


@dataclass(frozen=True)
class _Run:
    """What is to be changed."""

    recipe: RecipeSpec
    cluster: ClusterProfile
    num_nodes: int
    processes_per_node: int
    engine: EngineName

    def predict(self, change: Change) -> float:
        """Return the GiB of a process after a change."""
        fields = dict(change)
        num_shards = fields.pop("num_nodes", self.num_nodes) * self.processes_per_node
        training = self.recipe.training.model_copy(update=fields)
        device: Literal["cpu", "cuda"] = "cpu" if self.cluster.device == "cpu" else "cuda"
        shape = self.recipe.model.architecture
        kept = keeps_weights(shape, training, num_shards, self.engine, None)  # if left open, not where there is no room
        return predict_memory(shape, training, num_shards, self.engine, device, keeps_weights=kept).total

    def levers(self) -> Iterator[list[Change]]:
        """Yield what can be changed, what costs least first; each with its values, the mildest first."""
        training = self.recipe.training
        if training.reshard_after_forward == "never":
            yield [{"reshard_after_forward": "auto"}]
        yield self._checkpointing()
        yield [{"micro_batch_size": size} for size in _smaller_divisors(training.micro_batch_size)]
        yield self._optimizer_states()
        yield [{"sequence_length": length} for length in _halves(training.sequence_length)]
        yield self._more_nodes()
        lighter = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}[training.method]
        yield [{"method": value} for value in lighter]

    def _checkpointing(self) -> list[Change]:
        training = self.recipe.training
        steps = (("none", False), ("selective", False), ("full", False), ("full", True))
        now = steps.index((training.activation_checkpointing, training.activation_offload))
        possible = [
            (checkpointing, offload)
            for checkpointing, offload in steps[now + 1 :]
            if (checkpointing != "selective" or self.engine == "fsdp2")
            and not (offload and self.cluster.device == "cpu")
        ]
        return [
            ({} if checkpointing == steps[now][0] else {"activation_checkpointing": checkpointing})
            | ({"activation_offload": True} if offload else {})
            for checkpointing, offload in possible
        ]

    def _optimizer_states(self) -> list[Change]:
        """Return how the optimizer's states, and more, leave the device: 8 bits and offload exclude each other.

        8 bits come first: to round the states costs no time, to fetch them from main memory does in each step. Those of
        adapters are too few to matter.
        """
        training = self.recipe.training
        stays = training.optimizer == "adamw" and training.offload == "none"
        does_round = stays and self.engine == "fsdp2" and training.adapters is None
        stronger = {"none": ("optimizer", "all"), "optimizer": ("all",), "all": ()}[training.offload]
        whole: Change = {} if training.optimizer == "adamw" else {"optimizer": "adamw"}
        return ([{"optimizer": "adamw8bit"}] if does_round else []) + [
            whole | {"offload": value} for value in stronger if self.cluster.device != "cpu"
        ]

    def _more_nodes(self) -> list[Change]:
        """Return twice the nodes, if there are as many and the global batch can be divided among them."""
        twice = 2 * self.num_nodes
        training, cluster = self.recipe.training, self.cluster
        at_once = training.micro_batch_size * twice * self.processes_per_node
        enough = cluster.scheduler != "local" and (cluster.max_nodes is None or twice <= cluster.max_nodes)
        return [{"num_nodes": twice}] if enough and training.global_batch_size % at_once == 0 else []


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _smaller_divisors(number: int) -> list[int]:
    """Return the divisors below a number, largest first: with them the global batch stays what it is."""
    return _divisors(number)[-2::-1]


def _halves(length: int) -> list[int]:
    halves = []
    while length % 2 == 0 and length // 2 >= SHORTEST:
        length //= 2
        halves.append(length)
    return halves


def _typed(change: Change) -> str:
    """Return a change as it is typed."""
    words = {field: "true" if value is True else value for field, value in change.items()}
    return " ".join(
        f"--nodes {value}" if field == "num_nodes" else f"training.{field}={value}" for field, value in words.items()
    )
