"""From specs to a plan: every derived number of a run.

`plan_run` is pure. Its result is what plan.json holds: the only contract between submitting and training.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ftkit.config.cluster import ClusterProfile
from ftkit.config.image_reference import ImageFile, NamedImage, RegistryImage, image_file
from ftkit.config.model import ArchitecturePlan, ModelPlan, TrainedWeights
from ftkit.config.model_config import resolve_shape
from ftkit.config.recipe import RecipePlan
from ftkit.errors import ConfigError, FtkitError
from ftkit.files import InvalidJsonError, parse_json, to_json
from ftkit.planning.checks import find_notes, find_problems
from ftkit.planning.choices import (
    EnginePlan,
    ExecutionPlan,
    choose_engine,
    choose_execution,
    least_memory,
    suggest_changes,
    suggest_faster,
    with_resharding,
)
from ftkit.planning.estimates.memory import MemoryPlan, predict_memory
from ftkit.planning.estimates.parameters import count_by_config, count_model, method_counts
from ftkit.planning.estimates.step_time import PADDING, StepTimePlan, predict_step_time
from ftkit.planning.layout import DataLayout, RunLayout, Workspace
from ftkit.planning.setup import GPUS, Setup

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftkit.config.image import ImageSpec
    from ftkit.config.image_reference import AnyImage
    from ftkit.config.model import ArchitectureSpec, ModelCounts, ModelSpec
    from ftkit.config.recipe import RecipeSpec
    from ftkit.config.request import RunRequest
    from ftkit.config.training import EngineName, TrainingPlan, TrainingSpec
    from ftkit.planning.setup import Gpu

PLAN_VERSION = 1
PREPARATION_VERSION = 6
"""Part of the data's fingerprint, and of what checkpoints know their data by: raise it when the same spec would be
prepared into other packs."""


@dataclass(frozen=True)
class PlacementPlan:
    """Where the processes are: `num_nodes` x `processes_per_node`, one process for each GPU."""

    num_nodes: int
    processes_per_node: int
    device: Literal["cpu", "cuda"]
    threads_per_process: int

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.num_nodes * self.processes_per_node


@dataclass(frozen=True)
class BatchPlan:
    """The batch arithmetic: micro x processes with packs of their own x accumulation = global, in packs."""

    micro_batch_size: int
    accumulation_steps: int
    global_batch_size: int
    tokens_per_step: int


@dataclass(frozen=True)
class SweepPlan:
    """The sweep that a run belongs to, and the values that are this run's own.

    Args:
        id: of the sweep, the same for all of its runs.
        name: of the sweep; the runs' names are it and a number.
        values: by key, as they were typed.
    """

    id: str
    name: str
    values: dict[str, str]


@dataclass(frozen=True)
class RunPlan:
    """Everything that a run is. Frozen, and written to plan.json as it stands."""

    version: int
    ftkit_version: str
    id: str
    name: str
    created: datetime
    workspace: Path
    fingerprint: str
    recipe: RecipePlan
    cluster: ClusterProfile
    placement: PlacementPlan
    engine: EnginePlan
    batch: BatchPlan
    memory: MemoryPlan
    speed: StepTimePlan | None
    num_parameters: int
    num_trained: int
    num_steps: int | None
    image: str | None
    container_image: str | None
    python: str
    notes: tuple[str, ...]
    execution: ExecutionPlan = field(default_factory=ExecutionPlan)
    """Plans of earlier versions have none: their recipes set both."""
    sweep: SweepPlan | None = None
    """None for a run of its own."""

    @property
    def training_seconds(self) -> float | None:
        """Predicted time of all steps; None if the GPU or the number of steps is not known yet."""
        return None if self.speed is None or self.num_steps is None else self.num_steps * self.speed.step_seconds

    def cost_of(self, seconds: float) -> float | None:
        """Return what all GPUs cost in so many seconds, in the profile's currency; None if the price is not known."""
        price = self.cluster.price_per_gpu_hour
        return None if price is None else price * self.placement.world_size * seconds / 3600

    @property
    def has_preflight(self) -> bool:
        """Whether the nodes are checked before training."""
        asked, place = self.recipe.resources.preflight, self.placement
        return place.num_nodes > 1 and place.device == "cuda" if asked is None else asked

    @property
    def setup(self) -> Setup:
        """What memory and step time are predicted from."""
        recipe, engine = self.recipe, self.engine
        setup = _setup(recipe.model.architecture, recipe.training, engine.name, self.cluster, self.placement)
        return replace(setup, keeps_weights=engine.keeps_weights)

    @property
    def layout(self) -> RunLayout:
        """The run's folder."""
        return RunLayout(Workspace(self.workspace).runs / self.id)

    @property
    def image_file(self) -> Path | None:
        """The image's file; None without a container, or if the runtime gets an address or a docker engine's name."""
        return image_file(self.container_image)

    @property
    def data_directory(self) -> Path:
        """Folder of the tokenized and packed data."""
        return Workspace(self.workspace).data / self.fingerprint

    @property
    def is_data_prepared(self) -> bool:
        """Whether an earlier run has prepared the same data."""
        return DataLayout(self.data_directory).is_prepared

    @property
    def weights_to_export(self) -> TrainedWeights | None:
        """The checkpoint of an earlier run that is still to be exported; None if none is."""
        trained = self.recipe.model.trained
        return None if trained is None or Path(trained.folder).is_dir() else trained


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
    problems = find_problems(recipe, model, cluster, image, request, num_nodes, per_node)
    if problems:
        raise ConfigError(problems)
    placement = _placement(cluster, num_nodes, per_node)
    engine = choose_engine(shape, recipe.training, placement.world_size, cluster.gpu)
    lightest = _setup(shape, least_memory(recipe.training), engine.name, cluster, placement)
    training, execution = choose_execution(recipe.training, lightest)
    setup = with_resharding(replace(lightest, training=training))
    if setup.keeps_weights:
        engine = replace(engine, reason=f"{engine.reason}; layers stay unsharded", keeps_weights=True)
    padding = (request.padding or PADDING) if recipe.data.packing == "off" else 1.0
    planned, memory = RecipePlan.of(recipe, model, training), predict_memory(setup)
    name = request.name or recipe.name
    return RunPlan(
        version=PLAN_VERSION,
        ftkit_version=ftkit_version,
        id=f"{name}-{request.created:%Y%m%dT%H%M%SZ}-{request.suffix}",
        name=name,
        created=request.created,
        workspace=request.workspace,
        fingerprint=fingerprint(recipe, model, request.data_stamp),
        recipe=planned,
        cluster=cluster,
        placement=placement,
        engine=engine,
        batch=_batch(setup),
        memory=memory,
        speed=None if setup.gpu is None else predict_step_time(setup, setup.gpu, padding),
        num_parameters=count_model(shape).total,
        num_trained=method_counts(shape, training).trained,
        num_steps=count_steps(training, request.num_packs),
        image=str(request.image) if request.image and cluster.runtime != "none" else None,
        container_image=container_image(cluster, request.image, request.workspace),
        python=request.python if cluster.runtime == "none" else "python3",
        notes=(
            *_notes(setup, cluster, memory),
            *find_notes(model, cluster, image, recipe.data.packing, request.padding),
        ),
        execution=execution,
    )


def plan_model(model: ModelSpec, config: Mapping[str, Any] | None, counts: ModelCounts | None = None) -> ModelPlan:
    """Resolve a model to its whole shape, with its parameters counted.

    Args:
        model: the recipe's.
        config: of its weights, raw; None: there is none, or it can't be read from here.
        counts: of the model itself, where it was counted; None: they follow from the configuration or the shape.

    Raises:
        ConfigError: the recipe contradicts the configuration, or neither tells the whole shape.
    """
    shape = resolve_shape(model, config)
    if counts is None and config is not None:
        counts = count_by_config(config)
    return ModelPlan.of(model, shape, counts or count_model(shape))


def plan_for_counts(plan: RunPlan, counts: ModelCounts) -> RunPlan:
    """Return the plan with what follows from the parameters as they are counted on the real model.

    A plan by an estimate says so, and no layers stay unsharded by it: the counts decide that anew, and how much memory
    is needed. Micro-batch and checkpointing stay as planned.
    """
    shape = plan.recipe.model.architecture
    if shape.is_measured:
        return plan
    counted = ArchitecturePlan.of(shape, counts)
    setup = with_resharding(replace(plan.setup, shape=counted))
    return replace(
        plan,
        recipe=RecipePlan.of(plan.recipe, ModelPlan.of(plan.recipe.model, counted, counts), setup.training),
        engine=replace(plan.engine, keeps_weights=setup.keeps_weights),
        memory=predict_memory(setup),
        num_parameters=counts.total,
        num_trained=method_counts(counted, setup.training).trained,
    )


def fingerprint(recipe: RecipeSpec, model: ModelPlan, data_stamp: str) -> str:
    """Return the name of the prepared data: the same for whatever leads to the same packs."""
    parts = (
        str(PREPARATION_VERSION),
        recipe.data.model_dump_json(exclude={"packing"}),  # documents are packed on disk in any case
        model.tokenizer.model_dump_json(),
        f"{model.weights}@{recipe.model.revision}" if model.tokenizer.source == "model" else "",
        *model.added_tokens,
        str(recipe.training.sequence_length),
        str(model.architecture.vocab_size),  # no token is beyond it
        data_stamp,
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def count_steps(training: TrainingSpec, num_packs: int | None) -> int | None:
    """Return the number of optimizer steps; None as long as it depends on data not yet packed."""
    if training.max_steps is not None:
        return training.max_steps
    if num_packs is None or training.num_epochs is None:
        return None
    return -(-num_packs * training.num_epochs // training.global_batch_size)


def _placement(cluster: ClusterProfile, num_nodes: int, per_node: int) -> PlacementPlan:
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
        tokens_per_step=training.global_batch_size * training.sequence_length,
    )


def _gpu(cluster: ClusterProfile, placement: PlacementPlan) -> Gpu | None:
    return GPUS[cluster.gpu] if cluster.gpu and placement.device == "cuda" else None


def _setup(
    shape: ArchitectureSpec, training: TrainingPlan, engine: EngineName, cluster: ClusterProfile, place: PlacementPlan
) -> Setup:
    bits = cluster.network_gbps
    return Setup(
        shape, training, place.world_size, engine, place.device, _gpu(cluster, place), place.num_nodes,
        None if bits is None else bits * 1e9 / 8,
    )  # fmt: skip


def container_image(cluster: ClusterProfile, image: AnyImage | None, workspace: Path) -> str | None:
    """Return what the runtime is given: a path, the engine's name, or an address in the runtime's words."""
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


def _notes(setup: Setup, cluster: ClusterProfile, memory: MemoryPlan) -> tuple[str, ...]:
    """Return suggestions for a run that doesn't fit, or that could be much faster."""
    gpu = setup.gpu
    if gpu is None:
        return ()
    if memory.total <= gpu.usable_gib:
        faster = suggest_faster(setup, gpu)
        return () if faster is None else (f"by prediction, faster with the same global batch: {faster}",)
    note = (
        f"predicted peak of {memory.total:.0f} GiB is more than this GPU's {gpu.memory_gib:g} GiB can hold: "
        "expect an out-of-memory error"
    )
    fitting = suggest_changes(setup, cluster, gpu.usable_gib)
    return (note, *(f"would fit, by prediction: {suggestion}" for suggestion in fitting))


def plan_to_json(plan: RunPlan) -> str:
    """Return what plan.json holds."""
    return to_json(plan)


class PlanError(FtkitError):
    """A written plan can't be read back."""

    exit_code = ConfigError.exit_code


def plan_from_json(text: str | bytes, where: str) -> RunPlan:
    """Read a plan back; `where` names the text in messages.

    Raises:
        PlanError: it is no plan, or one of another version of ftkit, which allowed what this one refuses.
    """
    try:
        return parse_json(text, RunPlan)
    except InvalidJsonError as error:
        raise PlanError(
            f"can't read the plan in {where}: {error}",
            meaning=f"{_writer(text)} wrote it under other rules, or it was changed by hand",
            fix="to continue the run, use the ftkit that submitted it; or correct these keys in the recipe and "
            "start a new run. 'ftkit runs', 'status' and 'logs' still show this one",
        ) from error


@dataclass(frozen=True)
class _Writer:
    """The value of a plan that every version writes."""

    ftkit_version: str


def _writer(text: str | bytes) -> str:
    try:
        return f"ftkit {parse_json(text, _Writer).ftkit_version}"
    except InvalidJsonError:
        return "another version of ftkit"


def read_plan(layout: RunLayout) -> RunPlan:
    """Read the plan of a run.

    Raises:
        PlanError: it can't be read.
    """
    try:
        content = layout.plan.read_bytes()
    except OSError as error:
        raise PlanError(f"can't read {layout.plan}: {error}", fix="check that the run's folder is whole") from error
    return plan_from_json(content, str(layout.plan))
