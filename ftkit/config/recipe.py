"""A recipe: everything that defines a run, except where it runs; with evaluations, profiler and experiment trackers."""

from collections.abc import Container, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from ftkit.config.data import DataSpec
from ftkit.config.data_sources import HubSource
from ftkit.config.sbatch_options import SbatchOption
from ftkit.config.training import AttentionChoice, TrainingPlan, TrainingSpec
from ftkit.errors import PrerequisiteError
from ftkit.models.architecture import ArchitecturePlan, ModelPlan, ModelSpec
from ftkit.paths import is_address, is_path
from ftkit.spec import WHOLE_NUMBER, Name, NonNegativeFloat, NonNegativeInt, OneLine, PositiveInt, Spec, TimeLimit

SHARING_KERNELS: tuple[AttentionChoice, ...] = ("auto", "flex", "sdpa")
"""Attention for documents that share prompts: kernels that take any mask."""
SCORES: dict[str, tuple[str, ...]] = {
    "calls": ("calls", "call_names", "parallel_calls", "no_call"), "exact_match": ("exact_match",),
    "repetition": ("repetition",),
}  # fmt: skip
"""The scores that each of ftkit's metrics of completions yields."""
_LOWER_IS_BETTER = frozenset(("loss", "perplexity", "repetition", "kl", "kl_per_token", "next_token_loss"))


class GenerationSpec(Spec):
    """Generate completions for rows of the validation split, and score them."""

    metrics: tuple[OneLine, ...] = ()
    """`calls`, `exact_match`, `repetition`, or functions of `data.task`. If empty: the task's, `calls` if rows have
    tools, `exact_match` if there are neither, and `repetition`."""
    num_rows: PositiveInt = 100
    """Number of rows before and after training."""
    num_rows_during: Annotated[int, Field(ge=0, le=2**31), WHOLE_NUMBER] = 20
    """Number of rows in evaluations during training (`evaluation.every_steps`); always the same rows."""
    max_new_tokens: PositiveInt = 128
    """Longest completion, in tokens."""


class BestSpec(Spec):
    """The metric of the best evaluation."""

    metric: OneLine = "loss"
    """`loss`, `perplexity`, `loss/SOURCE`, a score of `evaluation.generation`, or a metric of the objective."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether lower or higher is better. `auto`: lower for losses, divergences, perplexity, repetition; else higher."""

    @property
    def is_lower_better(self) -> bool:
        return self.mode == "min" or (self.mode == "auto" and self.metric.partition("/")[0] in _LOWER_IS_BETTER)


class EvaluationSpec(Spec):
    """Evaluations on the validation split, before, during, and after training."""

    every_steps: PositiveInt | None = None
    """Steps between evaluations during training."""
    max_packs: PositiveInt = 64
    """Measure loss and perplexity on at most this many packs, spread evenly over those of the validation split."""
    generation: GenerationSpec | None = None
    """Score completions: exact match, tool calls, repetition, and metrics of `data.task`."""
    best: BestSpec | None = None
    """Keep the checkpoint of the best evaluation, and export it at the end: `RUN@best`. A checkpoint is written after
    each evaluation that is better than all before it."""
    early_stopping_patience: PositiveInt | None = None
    """End training after this many consecutive evaluations without improvement of `best.metric` (default: `loss`)."""
    early_stopping_threshold: NonNegativeFloat = 0.0
    """Improvement that must be exceeded to reset the count of early_stopping_patience."""

    @property
    def selection(self) -> BestSpec | None:
        """The metric of the best evaluation, if the run uses one."""
        return self.best or (None if self.early_stopping_patience is None else BestSpec())

    @model_validator(mode="after")
    def _comparisons_need_evaluations(self) -> Self:
        if self.every_steps is None and (self.best is not None or self.early_stopping_patience is not None):
            key = "best" if self.best is not None else "early_stopping_patience"
            raise ValueError(f"{key} compares evaluations during training: set every_steps")
        if self.early_stopping_threshold and self.early_stopping_patience is None:
            raise ValueError("early_stopping_threshold has no effect without early_stopping_patience")
        return self


class ExportSpec(Spec):
    """Limits of `ftkit export`."""

    max_loss_increase: NonNegativeFloat | None = None
    """Refuse a quantized model if quantization raises the validation loss by more than this, in nats per token."""


SinkName = Literal["tensorboard", "wandb", "mlflow"]

SINK_PACKAGES: Final[dict[SinkName, tuple[str, ...]]] = {
    "tensorboard": ("tensorboard",), "wandb": ("wandb",), "mlflow": ("mlflow-skinny", "mlflow"),
}  # fmt: skip
"""Python packages for each sink. One of them is required; messages mention the first."""


def sinks_without_package(sinks: Iterable[SinkName], packages: Container[str]) -> list[SinkName]:
    """Return the sinks that have none of these packages; names are normalized."""
    return [sink for sink in sinks if not any(name in packages for name in SINK_PACKAGES[sink])]


class TrackingSpec(Spec):
    """Experiment trackers that receive the records of metrics.jsonl. Keys and passwords come from the environment."""

    sinks: tuple[SinkName, ...] = ()
    """Any of `tensorboard`, `wandb` and `mlflow`; each is an extra of ftkit."""
    project: OneLine | None = None
    """W&B's project and MLflow's experiment. If null, `WANDB_PROJECT` and `MLFLOW_EXPERIMENT_NAME`, else `ftkit`."""
    mlflow_uri: OneLine | None = None
    """MLflow's tracking server, without user and password. `MLFLOW_TRACKING_URI` if null."""

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        # Check the whole spec: a message about a single key would show its value, which may contain a password.
        if len(set(self.sinks)) != len(self.sinks):
            raise ValueError(f"sinks lists one twice: {', '.join(self.sinks)}")
        if self.mlflow_uri is not None and "@" in urlsplit(self.mlflow_uri).netloc:
            raise ValueError(
                "mlflow_uri contains a user or a password: export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        if self.mlflow_uri is not None and self.sinks and "mlflow" not in self.sinks:
            raise ValueError("mlflow_uri has no effect without 'mlflow' among the sinks")
        return self


def check_packages(tracking: TrackingSpec) -> None:
    """Refuse (PrerequisiteError) trackers whose packages are not installed in this Python."""
    for name in tracking.sinks:
        if find_spec(name) is None:
            raise PrerequisiteError(
                f"tracking.sinks lists {name}, whose package is not installed",
                meaning="the Python environment or the image of the run was made without it",
                fix=f"pip install 'ftkit[{name}]', add it to the image's packages, or remove it from tracking.sinks",
            )


def check_access(tracking: TrackingSpec, environment: Mapping[str, str], *, sees_home: bool) -> None:
    """Refuse (PrerequisiteError) trackers without the key or the address that they need.

    Called before the job is submitted, with the job's variables as far as they are known, and again in the job.
    `sees_home` tells whether the job can read the user's home folder; in a container it can't.
    """
    if "wandb" in tracking.sinks and environment.get("WANDB_MODE", "online") in {"online", "shared"}:
        netrc = Path(environment.get("NETRC") or Path(environment.get("HOME") or "/", ".netrc"))
        has_key = environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE")
        if not has_key and not (sees_home and netrc.is_file()):
            raise PrerequisiteError(
                "tracking.sinks lists wandb, but there is no API key for it",
                meaning="WANDB_API_KEY is not set where the run is submitted; containers don't see ~/.netrc",
                fix="export WANDB_API_KEY before 'ftkit run', or WANDB_MODE=offline",
            )
    if "mlflow" not in tracking.sinks:
        return
    address = tracking.mlflow_uri or environment.get("MLFLOW_TRACKING_URI")
    if not address:
        raise PrerequisiteError(
            "tracking.sinks lists mlflow, but there is no server address",
            meaning="neither tracking.mlflow_uri nor MLFLOW_TRACKING_URI is set where the run is submitted",
            fix="give tracking.mlflow_uri=https://HOST, or export MLFLOW_TRACKING_URI before 'ftkit run'",
        )
    allows_folders = environment.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in {"1", "true"}
    if address.startswith(("file:", "/", ".")) and not allows_folders:
        raise PrerequisiteError(
            f"MLflow's client does not write to a folder: {address}",
            meaning="MLflow 3.17 refuses that unless MLFLOW_ALLOW_FILE_STORE is true",
            fix="give the address of a server; or export MLFLOW_ALLOW_FILE_STORE=true",
        )


class ProfileSpec(Spec):
    """torch's profiler over a few steps, in cycles of waiting, warming up and recording."""

    enabled: bool = False
    """Record a trace, and on GPUs a snapshot of the memory."""
    wait_steps: NonNegativeInt = 5
    """Steps at the beginning of each cycle that are not profiled, because the first steps compile kernels."""
    warmup_steps: NonNegativeInt = 3
    """Next steps of the cycle, which run under the profiler and are discarded."""
    active_steps: PositiveInt = 20
    """Next steps of the cycle, which are recorded."""
    cycles: PositiveInt = 1
    """Number of cycles; each writes a trace."""
    ranks: tuple[NonNegativeInt, ...] = Field(default=(0,), min_length=1)
    """Ranks to record."""
    with_stack: bool = False
    """Record the source location of each operation; traces are larger and steps slower."""
    record_shapes: bool = False
    """Record the shapes of the operations' inputs."""
    memory: bool = True
    """Record allocations and frees; on GPUs, also write a memory snapshot with its history."""

    @property
    def num_steps(self) -> int:
        """Number of steps until the last recorded one."""
        return self.cycles * (self.wait_steps + self.warmup_steps + self.active_steps)


class ResourcesSpec(Spec):
    """Resources that the recipe requests; options of `ftkit run` take precedence."""

    num_nodes: Annotated[int, Field(gt=0, le=2**16), WHOLE_NUMBER] = 1
    """Number of nodes."""
    gpus_per_node: PositiveInt | None = None
    """GPUs per node, one process each. All of the node's if null."""
    processes_per_node: PositiveInt | None = None
    """Processes per node without GPUs. The profile's number if null."""
    spare_nodes: Annotated[int, Field(ge=0, le=2**10), WHOLE_NUMBER] = 0
    """Additional idle nodes of the job, on Slurm. If a node no longer answers, a spare node replaces it within the job;
    if none is left, the job is requeued."""
    min_nodes: PositiveInt | None = None
    """On Slurm, if no spare node is left to replace a node that no longer answers, training continues in the job on at
    least this many nodes, if their processes divide the global batch and have enough memory. `num_nodes` if null."""
    max_restarts: Annotated[int, Field(ge=0, le=1000), WHOLE_NUMBER] = 3
    """Maximum consecutive restarts within a job, each from the newest checkpoint, after a process died or failed for a
    possibly transient reason. A new checkpoint resets the count. 0: never restart."""
    hang_timeout_seconds: PositiveInt = 600
    """A step counts as a hang if it takes longer than this and ten times the median of the last steps. All ranks then
    write their Python stacks and last collectives to `logs/`, and training restarts."""
    exclude_stragglers: bool = False
    """On Slurm with two or more nodes: exclude the slowest node when the job is requeued, if it computes at least 10%
    more slowly than the others (`ftkit status`). The cluster must have another node to replace it."""
    core_dumps: bool = False
    """Let crashed ranks write core dumps to the node's local disk, or for a script to its folder, unless the kernel's
    `core_pattern` sets another place. The error shows the place."""
    preflight: bool | None = None
    """On Slurm, check all nodes before training and exclude unhealthy ones. If null, true for GPUs on several nodes."""
    time_limit: TimeLimit | None = None
    """Time limit in Slurm's format: `minutes`, `hours:minutes:seconds` or `days-hours:minutes:seconds`. As in Slurm,
    `4:00` is four minutes. The profile's if null."""
    sbatch_options: tuple[SbatchOption, ...] = ()
    """More options for sbatch, after those of the profile: `[reservation=friday, comment=thesis]`. They are not part of
    the data's fingerprint: a run with other options uses the same prepared data, and `ftkit resume` may change them."""


MAIN_KEYS: Final = {"model": "weights", "data": "source"}
"""Sections with a short form, which is the value of this key."""


def _from_main_key(value: object, info: ValidationInfo) -> object:
    return {MAIN_KEYS[str(info.field_name)]: value} if isinstance(value, str) else value


def _as_destination(value: str) -> str:
    scheme, _, rest = value.partition("://")
    if value.startswith("/") or (scheme in ("s3", "gs") and rest.strip("/")):
        return value.rstrip("/")
    raise ValueError("expected s3://bucket/prefix, gs://bucket/prefix or an absolute folder")


class RecipeSpec(Spec):
    """A recipe: everything that defines a training run, except where it runs."""

    name: Name
    """Name of the recipe, and of its runs unless `--name` is given. If not given, the file's name."""
    description: str = ""
    """One line for `ftkit config recipes`."""
    image: str | None = None
    """Image to run in if neither the command line nor the settings set one."""
    model: Annotated[ModelSpec, BeforeValidator(_from_main_key, json_schema_input_type=str | ModelSpec)]
    """The model to fine-tune: only its weights (`model: Qwen/Qwen3-8B`), or its fields."""
    data: Annotated[DataSpec, BeforeValidator(_from_main_key, json_schema_input_type=str | DataSpec)]
    """The data to train and evaluate on: only its source (`data: ./chats.jsonl`), or its fields."""
    training: TrainingSpec = Field(default_factory=lambda: TrainingSpec.model_validate({}))
    """The optimization."""
    evaluation: EvaluationSpec = EvaluationSpec.model_construct()
    """Evaluations on the validation split, and early stopping."""
    export: ExportSpec = ExportSpec.model_construct()
    """Exports of the trained model."""
    tracking: TrackingSpec = TrackingSpec.model_construct()
    """Experiment trackers of the run."""
    profile: ProfileSpec = ProfileSpec.model_construct()
    """The profiler."""
    resources: ResourcesSpec = ResourcesSpec.model_construct()
    """Resources that the recipe requests."""
    sync: Annotated[str, AfterValidator(_as_destination)] | None = None
    """Destination to copy complete checkpoints and exports to while the run trains: `s3://bucket/prefix`,
    `gs://bucket/prefix` or a folder. `ftkit resume s3://bucket/prefix/RUN` continues the run on another machine."""

    @property
    def paths(self) -> list[tuple[str, str]]:
        """The models, files of data or patterns, and datasets that are paths, by key."""
        distillation = self.training.distillation
        places = {"model.weights": self.model.weights, "model.tokenizer.source": self.model.tokenizer.source}
        places |= {"training.distill.teacher": distillation.teacher} if distillation else {}
        models = [(key, place) for key, place in places.items() if is_path(place)]
        files = [(key, place) for key, place in self.data.files if not is_address(place)]
        datasets = [source.dataset for source in self.data.sources if isinstance(source, HubSource)]
        return [*models, *files, *(("data.source.dataset", place) for place in datasets if is_path(place))]


def why_not_shared(recipe: RecipeSpec, shape: ArchitecturePlan) -> str:
    """Return why prompts of pairs can't be computed once; empty if, as far as the plan knows, they can."""
    training = recipe.training
    if training.documents_per_sample == 1:
        return f"objective '{training.objective}' has no pairs"
    if recipe.data.packing == "off":
        return "data.packing is 'off'"
    if recipe.data.pictures:
        return "a picture of the prompt would belong to both sides"
    if training.gpus_per_pack > 1:
        return "GPUs that divide a pack have kernels that take documents, not masks"
    if training.attention not in SHARING_KERNELS:
        return f"attention '{training.attention}' takes documents, not masks"
    return "" if shape.sliding_window is None else "some layers have sliding windows"


def shares_prompts(recipe: RecipeSpec, shape: ArchitecturePlan) -> bool | None:
    """Return whether prompts of pairs are computed once; None if preparation decides by the tokens saved."""
    if recipe.data.share_prompts is not None:
        return recipe.data.share_prompts
    return None if shape.is_measured and not why_not_shared(recipe, shape) else False


class RecipePlan(RecipeSpec):
    """A recipe with all `auto` values resolved and the model's parameters counted."""

    model: ModelPlan
    training: TrainingPlan
    teacher: ModelPlan | None = None
    """The teacher of objective distill."""

    @property
    def models(self) -> list[ModelPlan]:
        return [each for each in (self.model, self.teacher) if each is not None]
