"""The records of metrics.jsonl: what the trainer says of a run, and what everyone else reads of it."""

from __future__ import annotations

import json
import socket
import time
import traceback
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from ftkit.errors import FtkitError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True)
class StageRecord:
    """The run has come to a stage that takes a while."""

    event: ClassVar[str] = "stage"
    time: float
    stage: str


@dataclass(frozen=True)
class StartRecord:
    """Training begins, or goes on after `resumed_from` steps."""

    event: ClassVar[str] = "start"
    time: float
    num_steps: int
    resumed_from: int
    world_size: int
    engine: str
    device: str
    num_parameters: int
    versions: dict[str, str]


@dataclass(frozen=True)
class ProofRecord:
    """What was proven of the sharded model before step 1."""

    event: ClassVar[str] = "proof"
    time: float
    checks: dict[str, str]


@dataclass(frozen=True)
class MemoryRecord:
    """The memory of the device at the end of a stage, in GiB: on rank 0, and the largest over the ranks.

    The peak is that of the stage. On processors, allocated and reserved are the process's resident set.
    """

    event: ClassVar[str] = "memory"
    time: float
    stage: str
    allocated_gib: float
    peak_gib: float
    reserved_gib: float
    largest_allocated_gib: float
    largest_peak_gib: float
    largest_reserved_gib: float


@dataclass(frozen=True)
class StepRecord:
    """The state after an optimizer step.

    `loss` is the mean over the target tokens of this step, `tokens` counts all input tokens so far,
    `tokens_per_second` is over all processes, `overhead_ratio` is the part of the time since the last
    record that was not forward, backward or optimizer, `data_wait_ratio` the part in which there was no
    batch to work on, `mfu` the part of the GPUs' peak that the work comes to (none: their peak is not known).
    """

    event: ClassVar[str] = "step"
    time: float
    step: int
    num_steps: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    step_seconds: float
    overhead_ratio: float
    data_wait_ratio: float
    mfu: float | None
    memory_gib: float | None


@dataclass(frozen=True)
class Sample:
    """One held-out question with the reference answer and the model's."""

    question: str
    reference: str
    answer: str
    correct: bool


@dataclass(frozen=True)
class EvaluationRecord:
    """A measurement on the held-out part. `execution_accuracy` is a part of 1."""

    event: ClassVar[str] = "evaluation"
    time: float
    step: int
    when: Literal["before", "during", "after"]
    loss: float
    perplexity: float
    execution_accuracy: float | None
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint is complete: `seconds` after it was begun, for `stalled_seconds` of which training waited."""

    event: ClassVar[str] = "checkpoint"
    time: float
    step: int
    path: str
    seconds: float
    stalled_seconds: float


@dataclass(frozen=True)
class EndRecord:
    """The trainer ended as it should: all steps done, or stopped by request after a checkpoint."""

    event: ClassVar[str] = "end"
    time: float
    outcome: Literal["completed", "stopped"]
    step: int
    training_seconds: float
    export: str | None


Record = (
    StageRecord
    | StartRecord
    | ProofRecord
    | MemoryRecord
    | StepRecord
    | EvaluationRecord
    | CheckpointRecord
    | EndRecord
)

_KINDS: dict[str, type[Any]] = {kind.event: kind for kind in get_args(Record)}


def to_line(record: Record) -> str:
    """Return a record as one line of JSON, without the line break."""
    return json.dumps({"event": record.event, **asdict(record)}, allow_nan=True)


def from_line(line: str) -> Record | None:
    """Read a line back; None for a line that is cut off or that another version wrote."""
    try:
        values = json.loads(line)
        kind = _KINDS[values.pop("event")]
        known = {field.name for field in fields(kind)}
        record = kind(**{key: value for key, value in values.items() if key in known})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if isinstance(record, EvaluationRecord):
        samples = tuple(sample if isinstance(sample, Sample) else Sample(**sample) for sample in record.samples)
        return EvaluationRecord(**{**vars(record), "samples": samples})
    return record  # type: ignore[no-any-return]


def read_records(path: Path) -> list[Record]:
    """Read all records of a run; an empty list if there are none yet."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [record for line in text.splitlines() if (record := from_line(line)) is not None]


def append_record(path: Path, record: Record) -> None:
    """Add a record to the end of a file; one write, so that a reader never sees half a line of it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(to_line(record) + "\n")


@dataclass(frozen=True)
class RankError:
    """What ended a rank. `exit_code` is that of the error's class if a user can act on it, else 1."""

    time: float
    rank: int
    host: str
    type: str
    message: str
    traceback: str
    exit_code: int

    @classmethod
    def from_exception(cls, error: BaseException, *, rank: int) -> RankError:
        """Describe an exception that is being handled."""
        return cls(
            time=time.time(),
            rank=rank,
            host=socket.gethostname(),
            type=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            exit_code=error.exit_code if isinstance(error, FtkitError) else 1,
        )


def write_rank_error(path: Path, error: RankError) -> None:
    """Write a rank's error beside its log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(error), indent=2) + "\n", encoding="utf-8")


def read_rank_error(path: Path) -> RankError | None:
    """Read an error back; None for a file that is no such thing."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return RankError(**{field.name: values[field.name] for field in fields(RankError)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_last_step(path: Path, *, tail_bytes: int = 16_384) -> StepRecord | None:
    """Read the newest step's record from the end of the file, without reading the whole if it can be helped."""
    for line in _lines_backwards(path, tail_bytes):
        record = from_line(line) if '"event": "step"' in line else None
        if isinstance(record, StepRecord):
            return record
    return None


def read_last_record(path: Path, *, tail_bytes: int = 2_048) -> Record | None:
    """Read the newest record from the end of the file."""
    return next((record for line in _lines_backwards(path, tail_bytes) if (record := from_line(line))), None)


def _lines_backwards(path: Path, tail_bytes: int) -> Iterator[str]:
    """Yield the lines of a file from its last to its first, reading ever longer tails of it."""
    try:
        with path.open("rb") as file:
            start = size = file.seek(0, 2)
            unfinished = b""
            while start > 0:
                start = max(0, size - tail_bytes)
                file.seek(start)
                chunk = file.read(size - start) + unfinished
                unfinished, *complete = chunk.split(b"\n") if start else [b"", *chunk.split(b"\n")]
                yield from (line.decode("utf-8", errors="replace") for line in reversed(complete))
                size, tail_bytes = start, tail_bytes * 8
    except FileNotFoundError:
        return


class RecordTail:
    """Reads the records that were added to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read_new(self) -> list[Record]:
        """Return the complete lines that are new."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read()
        except FileNotFoundError:
            return []
        complete = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(complete)
        lines = complete.decode("utf-8", errors="replace").splitlines()
        return [record for line in lines if (record := from_line(line)) is not None]
