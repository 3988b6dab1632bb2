"""The plan of a run of ftkit's trainer or of a user's script, with every number in it, as stored in plan.json.

plan.json is the only contract between submission and training: `ftkit.planning.planner` makes it, all others read it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ftkit import __version__
from ftkit.config.cluster import ClusterProfile
from ftkit.config.image_reference import image_file
from ftkit.config.recipe import RecipePlan, ResourcesSpec
from ftkit.errors import UnusableFileError
from ftkit.files import InvalidJsonError, parse_json, to_json
from ftkit.planning.choices import EnginePlan, ExecutionPlan
from ftkit.planning.fit import Fit, HostMemoryPlan, MemoryPlan
from ftkit.planning.layout import DataLayout, RunLayout, Workspace
from ftkit.planning.step_time import StepTimePlan
from ftkit.planning.training_setup import GPUS, Setup

if TYPE_CHECKING:
    from ftkit.config.data import DataSpec
    from ftkit.config.training import EngineName, TrainingPlan
    from ftkit.models.architecture import ArchitectureSpec, TrainedWeights

PREPARATION_VERSION = 12
"""Part of the data's fingerprint, and of its identity in checkpoints. Increase it when the same spec would be packed
differently."""
StopSignal = Literal["TERM", "USR1", "none"]  # signal for a script's processes when the run is asked to stop
RUN_FOLDER: Final = "{run}"  # placeholder for the run's folder in a script's arguments


@dataclass(frozen=True)
class PlacementPlan:
    """Placement of the processes: `num_nodes` x `processes_per_node`, one process per GPU."""

    num_nodes: int
    processes_per_node: int
    device: Literal["cpu", "cuda"]
    threads_per_process: int

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.processes_per_node


@dataclass(frozen=True)
class CodePlan:
    """A copy of a folder of code in the run's folder, first on PYTHONPATH."""

    name: str  # name of the copy, in the run's `code`
    source: str  # folder that it was copied from
    sha256: str  # digest of the names and contents of its files
    commit: str | None  # commit of the git checkout that contains the folder; null if there is none
    has_uncommitted_changes: bool


@dataclass(frozen=True, kw_only=True)
class JobPlan(ABC):
    """The part of a run's plan that scheduler, runtime and run folder use."""

    version: Literal[4]  # of the plan's fields and their meaning; a plan with another version is refused
    ftkit_version: str
    id: str
    name: str
    created: datetime
    workspace: Path
    cluster: ClusterProfile
    placement: PlacementPlan
    image: str | None
    container_image: str | None
    python: str
    notes: tuple[str, ...] = ()
    code: tuple[CodePlan, ...] = ()

    @property
    @abstractmethod
    def resources(self) -> ResourcesSpec:
        """Resources that the run requests from the scheduler."""

    @property
    def layout(self) -> RunLayout:
        return RunLayout(Workspace(self.workspace).runs / self.id)

    @property
    def image_file(self) -> Path | None:
        """The image's file; None without a container, or if the runtime gets an address or a docker image name."""
        return image_file(self.container_image)

    @property
    def number(self) -> str:
        """The number of this run in its sweep, which is also that of its task in a job array."""
        return self.name.rpartition("-")[2]

    @property
    def has_preflight(self) -> bool:
        """Whether the nodes are checked before the run starts."""
        setting, place = self.resources.preflight, self.placement
        return place.num_nodes > 1 and place.device == "cuda" if setting is None else setting

    def cost_of(self, seconds: float) -> float | None:
        """Return the cost of all GPUs for this time, in the profile's currency; None on CPUs or without a price."""
        price = self.cluster.price_per_gpu_hour
        if price is None or self.placement.device == "cpu":
            return None
        return price * self.placement.world_size * seconds / 3600


# --- A run of ftkit's trainer ------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes in packs: micro-batch x processes with different packs x accumulation steps = global batch."""

    micro_batch_size: int
    accumulation_steps: int
    global_batch_size: int


@dataclass(frozen=True)
class DocumentFit:
    """How many of the tokenized documents or pairs fit a pack, and the tokens of the longest of all."""

    num_read: int
    num_fitting: int
    longest: int
    is_complete: bool  # whether these are all documents, rather than those of the first rows
    too_long: dict[str, int] = field(default_factory=dict)  # longer ones, by how they are handled
    saved: float | None = None  # fraction of tokens saved by sharing prompts; None if prompts are not shared

    @property
    def num_whole(self) -> int:
        """Number of documents of which every token is trained on: those that fit, and those that are split."""
        return self.num_fitting + self.too_long.get("split", 0)


@dataclass(frozen=True)
class SweepPlan:
    """The sweep that a run belongs to, and this run's values by key, as typed."""

    id: str
    name: str
    values: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class RunPlan(JobPlan):
    fingerprint: str
    recipe: RecipePlan
    engine: EnginePlan
    batch: BatchPlan
    memory: MemoryPlan
    speed: StepTimePlan | None
    num_parameters: int
    num_trained: int
    num_steps: int | None
    fill_ratio: float | None  # fraction of the packs that is not padding; None before the data is prepared
    num_tokens: int | None  # tokens of the documents of all steps, without padding; None before the data is prepared
    documents: DocumentFit | None = None  # None if it is not known
    execution: ExecutionPlan = field(default_factory=ExecutionPlan)  # what the planner chose
    host_memory: HostMemoryPlan | None = None  # None if nothing is offloaded
    sweep: SweepPlan | None = None  # None if the run is not part of a sweep

    @property
    def resources(self) -> ResourcesSpec:
        return self.recipe.resources

    @property
    def training_seconds(self) -> float | None:
        """Predicted time of all steps; None if it is not predicted, or while the number of steps is unknown."""
        return None if self.speed is None or self.num_steps is None else self.num_steps * self.speed.step_seconds

    def on_nodes(self, num_nodes: int) -> RunPlan | None:
        """Return the plan on fewer nodes, with the same global batch, so that the order of the data does not change.

        Returns None if the nodes are fewer than `resources.min_nodes`, can't divide the batch, or lack memory.
        """
        most, engine, batch = self.placement.num_nodes, self.engine, self.batch
        placement = replace(self.placement, num_nodes=num_nodes)
        ranks, odd_ranks = divmod(placement.world_size, self.recipe.training.gpus_per_pack)
        replicas, odd_shards = divmod(engine.num_replicas * num_nodes, most) if engine.num_replicas > 1 else (1, 0)
        steps, odd_packs = divmod(batch.global_batch_size, batch.micro_batch_size * max(1, ranks))
        if not (self.resources.min_nodes or most) <= num_nodes <= most or odd_ranks or odd_shards or odd_packs:
            return None
        engine, batch = replace(engine, num_replicas=replicas), replace(batch, accumulation_steps=steps)
        new = replace(self, placement=placement, engine=engine, batch=batch)
        gpu = new.setup.gpu
        return new if gpu is None or Fit(new.setup).steps.total <= gpu.usable_gib else None

    @property
    def setup(self) -> Setup:
        """Inputs of the predictions of memory and step time."""
        recipe, engine = self.recipe, self.engine
        setup = setup_of(
            recipe.model.architecture, recipe.training, engine.name, self.cluster, self.placement, recipe.data
        )
        return replace(
            setup,
            keeps_weights=engine.keeps_weights,
            num_shards=setup.num_shards // engine.num_replicas,
            num_replicas=engine.num_replicas,
            defers_sync=engine.defers_sync,
            has_linear_kernel=engine.has_linear_kernel,
            teacher=recipe.teacher.architecture if recipe.teacher else None,
        )

    @property
    def checkpointing_label(self) -> str:
        num_layers = self.recipe.model.architecture.num_hidden_layers
        return self.recipe.training.checkpointing_label(num_layers, self.engine.name)

    @property
    def data(self) -> DataLayout:
        """The folder of the tokenized and packed data, which an earlier run may have prepared."""
        return DataLayout(Workspace(self.workspace).data / self.fingerprint)

    @property
    def weights_to_export(self) -> TrainedWeights | None:
        """The checkpoint of an earlier run that must be exported before training; None if there is none."""
        trained = self.recipe.model.trained
        return None if trained is None or Path(trained.folder).is_dir() else trained


def setup_of(
    shape: ArchitectureSpec, training: TrainingPlan, engine: EngineName, cluster: ClusterProfile, place: PlacementPlan,
    data: DataSpec,
) -> Setup:  # fmt: skip
    """Return the inputs of the predictions of memory and step time, with layers resharded after the forward pass."""
    return Setup(
        shape,
        training,
        place.world_size,
        engine,
        place.device,
        gpu=GPUS[cluster.gpu] if cluster.gpu and place.device == "cuda" else None,
        num_nodes=place.num_nodes,
        node_bandwidth=None if cluster.network_gbps is None else cluster.network_gbps * 1e9 / 8,
        node_memory_gib=cluster.memory_per_node_gib,
        has_packs=not data.pictures and data.packing != "off",
    )


# --- A run of a user's script ------------------------------------------------------------------------


@dataclass(frozen=True)
class Script:
    path: str  # path of the script within the copy of its folder
    args: tuple[str, ...]
    folder: str  # working folder of its processes
    accelerate: dict[str, Any] | None  # content of accelerate's configuration; null without one
    stop_signal: StopSignal
    can_restart: bool  # whether it resumes from its own checkpoint when it is restarted
    resources: ResourcesSpec
    recipe: str | None = None  # name of the recipe that the configuration was made from; null without one
    is_proved: bool = False  # whether its first steps are watched and checked

    @property
    def asks_for_sharding(self) -> bool:
        """Whether accelerate's configuration shards the model."""
        return self.accelerate is not None and self.accelerate.get("distributed_type") in {"FSDP", "DEEPSPEED"}


@dataclass(frozen=True, kw_only=True)
class ScriptPlan(JobPlan):
    script: Script

    @property
    def resources(self) -> ResourcesSpec:
        return self.script.resources


# --- plan.json ---------------------------------------------------------------------------------------


def plan_to_json(plan: RunPlan | ScriptPlan) -> str:
    return to_json(plan)


class PlanError(UnusableFileError):
    """A written plan can't be read back."""


@dataclass(frozen=True)
class _Header:
    """The part of a plan that every version writes, which distinguishes a script's plan from the trainer's."""

    ftkit_version: str = ""
    script: object = None


def parse_plan(text: str | bytes, where: str) -> RunPlan | ScriptPlan:
    """Parse a plan; `where` is the place of the text in messages.

    Raises `PlanError` if it is not one, or another version of ftkit wrote it, with values that this version refuses.
    """
    try:
        header = parse_json(text, _Header)
    except InvalidJsonError:
        header = _Header()
    try:
        return parse_json(text, RunPlan) if header.script is None else parse_json(text, ScriptPlan)
    except InvalidJsonError as error:
        writer = f"ftkit {header.ftkit_version}" if header.ftkit_version else "another version of ftkit"
        writer = f"another commit of {writer}" if header.ftkit_version == __version__ else writer
        raise PlanError(
            f"can't read the plan in {where}: {error}",
            meaning=f"{writer} wrote it under other rules, or it was edited manually",
            fix="to continue the run, use the ftkit that submitted it; or correct these keys in the recipe and "
            "start a new run. 'ftkit runs', 'status' and 'logs' still show this one",
            name="unreadable-plan",
        ) from error


def read_job_plan(layout: RunLayout) -> RunPlan | ScriptPlan:
    """Read the plan of a run, for either kind of job. Raises `PlanError` if it can't be read."""
    try:
        text = layout.plan.read_bytes()
    except OSError as error:
        fix = "check that the run's folder is complete"
        raise PlanError(f"can't read {layout.plan}: {error}", fix=fix, name="no-plan") from error
    return parse_plan(text, str(layout.plan))


def read_plan(layout: RunLayout) -> RunPlan:
    """Read the plan of a run of ftkit's trainer. Raises `PlanError` if it can't be read, or is a script's plan."""
    plan = read_job_plan(layout)
    if isinstance(plan, ScriptPlan):
        raise PlanError(
            f"{layout.plan} is the plan of a script, not of ftkit's trainer",
            meaning="ftkit knows neither the script's data nor its checkpoints",
            fix="'ftkit status', 'logs', 'cancel', 'resume' and 'rm' work for it",
            name="plan-of-script",
        )
    return plan


def read_plan_to_use(layout: RunLayout) -> RunPlan:
    """Read the plan of a run to use its files without continuing it. Raises `PlanError` as `read_plan` does.

    If the workspace was moved or copied, or is mounted elsewhere on this machine, the returned plan has the workspace
    that contains the run's folder and its data now.
    """
    plan = read_plan(layout)
    here = replace(plan, workspace=layout.root.parent.parent)
    return here if here.data.is_prepared else plan
