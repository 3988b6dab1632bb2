"""The records of metrics.jsonl and their JSON lines. The trainer writes them; all other parts read them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Annotated, ClassVar, Literal

from pydantic import Field, TypeAdapter
from pydantic_core import from_json

Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
"""A duration or a time since the epoch, in seconds; finite, so that it can be formatted as hours and days."""


@dataclass(frozen=True)
class Record:
    """A record of metrics.jsonl. Its line includes the event and the time in seconds since the epoch."""

    event: ClassVar[str]
    time: Seconds

    def __init_subclass__(cls, *, event: str) -> None:
        cls.event = event


@dataclass(frozen=True)
class StageRecord(Record, event="stage"):
    """The run enters a stage that takes a while."""

    stage: str


@dataclass(frozen=True)
class StartRecord(Record, event="start"):
    """Training starts, or continues after `resumed_from` steps."""

    num_steps: Count
    resumed_from: Count
    world_size: Count
    engine: str
    device: str
    num_parameters: Count
    versions: dict[str, str]
    damaged: tuple[Count, ...] = ()  # steps of later checkpoints, from which training would have continued


Checks = dict[str, int | str]  # results by check: a count or a text


@dataclass(frozen=True)
class VerificationRecord(Record, event="proof"):
    """The results of the checks before step 1."""

    checks: Checks

    @property
    def texts(self) -> dict[str, str]:
        return {name: f"{value:,}" if isinstance(value, int) else value for name, value in self.checks.items()}


@dataclass(frozen=True)
class MemoryRecord(Record, event="memory"):
    """The memory of the device at the end of a stage, and its peak, in GiB: on rank 0, and the largest over ranks."""

    stage: str
    allocated_gib: float  # on CPUs, the process's resident set, as is the reserved memory
    peak_gib: float
    reserved_gib: float
    largest_allocated_gib: float
    largest_peak_gib: float
    largest_reserved_gib: float


@dataclass(frozen=True)
class FirstStepRecord(Record, event="first_step"):
    """The first step of a start is complete, `seconds` after the job script started torchrun, in these phases."""

    step: Count
    seconds: Seconds
    phases: dict[str, Seconds]


@dataclass(frozen=True)
class SourceLoss:
    """The mean loss over the trained tokens of one source of a mixture, and their number."""

    loss: float
    num_targets: Count


@dataclass(frozen=True)
class RouterStats:
    """Router statistics of a mixture of experts in a step; the last two are None for families without such a loss.

    An expert's utilization is its number of tokens divided by the mean of its layer's experts.
    """

    max_utilization: float
    mean_max_utilization: float  # mean over layers of the largest utilization
    dead_expert_ratio: float  # fraction of experts without a token
    router_entropy: float | None  # mean entropy of a token's probabilities, as a fraction of the largest possible
    load_balancing_loss: float | None  # without its coefficient: the experts per token if tokens are spread evenly


@dataclass(frozen=True)
class StepRecord(Record, event="step"):
    """The state after an optimizer step; speed, MFU, and ratios cover the time since the last record."""

    step: Count
    num_steps: Count
    epoch: float
    loss: float  # mean over the target tokens of this step, or its pairs, without the load-balancing loss
    learning_rate: float
    grad_norm: float
    tokens: Count  # of all documents so far, without padding
    targets: Count  # of these, tokens in the loss
    tokens_per_second: float  # over all processes
    step_seconds: Seconds
    overhead_ratio: float  # part of the time that was not forward, backward or optimizer
    data_wait_ratio: float  # part of the time without a batch to work on
    mfu: float | None  # model FLOPs utilization; None if the GPUs' peak is unknown
    memory_gib: float | None  # peak of rank 0 so far, as in a `MemoryRecord`
    sources: dict[str, SourceLoss] = field(default_factory=dict)  # of a mixture, with target tokens in this step
    scores: dict[str, float] = field(default_factory=dict)  # metrics of pairs: means over this step's pairs
    routers: RouterStats | None = None  # of a mixture of experts


@dataclass(frozen=True)
class AnomalyRecord(Record, event="anomaly"):
    """An anomalous step, with its packs.

    `nonfinite`: its loss or gradient is not finite, and the optimizer step was skipped. `spike`: its loss or gradient
    is far above those of the steps before it.
    """

    step: Count
    kind: Literal["nonfinite", "spike"]
    loss: float
    grad_norm: float
    packs: tuple[Count, ...]


@dataclass(frozen=True)
class Sample:
    """A prompt of the validation split, its reference and completion; `correct` if its first score is perfect."""

    question: str
    reference: str
    answer: str
    correct: bool
    picture: str | None = None  # thumbnail, as a `data:` URI


@dataclass(frozen=True)
class EvaluationRecord(Record, event="evaluation"):
    """A measurement on the validation split."""

    step: Count
    when: Literal["before", "during", "after", "job"]  # `job`: of a checkpoint, by `ftkit eval --as-job`
    loss: float
    perplexity: float
    samples: tuple[Sample, ...]
    sources: dict[str, SourceLoss] = field(default_factory=dict)  # of a mixture
    scores: dict[str, float] = field(default_factory=dict)  # means of the metrics of completions and of pairs

    def measures(self, metric: str) -> bool:
        """Return whether the evaluation has a value, even if it is not finite, of this loss or score."""
        name, _, source = metric.partition("/")
        return source in self.sources if source else name in {"loss", "perplexity", *self.scores}

    def value_of(self, metric: str) -> float:
        """Return the loss, perplexity, loss of a source (`loss/NAME`), or score of that name; NaN if not measured."""
        name, _, source = metric.partition("/")
        if source:
            return self.sources[source].loss if source in self.sources else math.nan
        return {"loss": self.loss, "perplexity": self.perplexity, **self.scores}.get(name, math.nan)


@dataclass(frozen=True)
class CheckpointRecord(Record, event="checkpoint"):
    """A checkpoint is complete, `seconds` after it was started; training waited for `stalled_seconds` of them."""

    step: Count
    path: str
    seconds: Seconds
    stalled_seconds: Seconds


@dataclass(frozen=True)
class FailedCheckpointRecord(Record, event="failed_checkpoint"):
    """A checkpoint could not be written, and training continues; it is the `num_failed`th in a row."""

    step: Count
    reason: str
    num_failed: Count


@dataclass(frozen=True)
class ShardingRecord(Record, event="sharding"):
    """How a script's model is sharded at its first optimizer step, or when it fails before that."""

    sharding: str  # `fsdp2`, `fsdp1`, `zero3`, `ddp` or `none`
    num_units: Count  # modules whose parameters are sharded together
    num_parameters: Count
    num_held: Count  # parameters on rank 0
    world_size: Count
    warning: str  # empty if the model is sharded as expected


@dataclass(frozen=True)
class ScriptStepRecord(Record, event="script-step"):
    """The progress of a script: optimizer steps, and values from its output."""

    step: Count
    num_steps: Count | None = None
    loss: float | None = None
    learning_rate: float | None = None
    seconds_left: Seconds | None = None


@dataclass(frozen=True)
class EndRecord(Record, event="end"):
    """The trainer ended normally: all steps are done, or it stopped on request after a checkpoint."""

    outcome: Literal["completed", "stopped"]
    step: Count
    training_seconds: Seconds  # of the last start
    export: str | None
    best_step: Count | None = None  # of the best evaluation, which is exported
    early_stopping_patience: Count | None = None  # set if it ended training before the last step
    has_checkpoint: bool = True  # false for scripts, for which it is unknown


_KINDS: dict[str, type[Record]] = {kind.event: kind for kind in Record.__subclasses__()}


@cache
def _adapter(event: str) -> TypeAdapter[Record]:
    return TypeAdapter(_KINDS[event])


def to_line(record: Record) -> str:
    """Return a record as one line of JSON, without the line break."""
    values = {"event": record.event, **asdict(record)}
    for optional in ("sources", "scores", "routers"):  # omitted if empty
        if not values.get(optional):
            values.pop(optional, None)
    return json.dumps(values, allow_nan=True)


def from_line(line: str | bytes) -> Record | None:
    """Parse a line; None if it is truncated, damaged, or from another version."""
    try:
        values = from_json(line)
        return _adapter(values.pop("event")).validate_python(values)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def is_damaged(line: bytes) -> bool:
    """Return whether a line is not a record of any version of ftkit. A failed write leaves an empty line."""
    if line.isspace():
        return False
    try:
        values = from_json(line)
    except ValueError:
        return True
    return not (isinstance(values, dict) and isinstance(values.get("event"), str))
