"""Progress of a run: a summary of its records, restarts with their reasons, the time left, and whether it stalls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ftkit.files import read_json_if_valid, read_small
from ftkit.runs.ends import End
from ftkit.runs.job import Job, RunState
from ftkit.runs.lease import current_holder
from ftkit.runs.metrics_file import read_last_record, read_last_step, read_outline
from ftkit.runs.records import (
    AnomalyRecord,
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    FailedCheckpointRecord,
    Record,
    ScriptStepRecord,
    ShardingRecord,
    StartRecord,
    StepRecord,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.planning.layout import RunLayout

_MIN_STALL_SECONDS = 300.0
"""Clocks of nodes can differ by minutes."""
_STAGE_STALL_SECONDS = 1800.0
"""No records are written while weights are loaded, code is compiled, or a model is evaluated or exported."""
_STALLED_STEPS = 10
"""Number of records missed until a run counts as stalled."""


@dataclass(frozen=True)
class TrainingSummary:
    """The records that summarize a run; None for those that don't exist yet."""

    start: StartRecord | None = None
    first_step: StepRecord | None = None
    last_step: StepRecord | None = None
    before: EvaluationRecord | None = None
    after: EvaluationRecord | None = None
    checkpoint: CheckpointRecord | None = None
    failed_checkpoint: FailedCheckpointRecord | None = None
    """After the newest checkpoint that could be written."""
    end: EndRecord | None = None
    sharding: ShardingRecord | None = None
    """Of a script's model."""
    script_step: ScriptStepRecord | None = None


_LAST_OF: dict[type[Record], str] = {
    StartRecord: "start",
    CheckpointRecord: "checkpoint",
    FailedCheckpointRecord: "failed_checkpoint",
    EndRecord: "end",
    ShardingRecord: "sharding",
    ScriptStepRecord: "script_step",
}
"""Kinds of records of which the newest counts, with their names in a summary."""


def summarize(layout: RunLayout) -> TrainingSummary:
    """Read the records that summarize a run, with the paths that its files have now: the folder may have been moved."""
    found: dict[str, Any] = {}
    for record in read_outline(layout.metrics):
        if name := _LAST_OF.get(type(record)):
            found[name] = record
        match record:
            case StartRecord():  # the run goes on: the end of an earlier start is none
                found.pop("end", None)
            case StepRecord():
                found["first_step"] = record
            case EvaluationRecord(when="before"):
                found.setdefault("before", record)
            case EvaluationRecord(when="after"):
                found["after"] = record
            case CheckpointRecord():
                found.pop("failed_checkpoint", None)
                found["checkpoint"] = replace(record, path=str(layout.checkpoint(record.step)))
            case EndRecord(export=str()):
                found["end"] = replace(record, export=str(layout.export))
    return TrainingSummary(**found, last_step=read_last_step(layout.metrics))


def list_checkpoints(layout: RunLayout) -> list[tuple[int, Path]]:
    """Return the complete checkpoints with their steps, oldest first; none if they can't be listed."""
    try:
        return layout.list_checkpoints()
    except OSError:
        return []


@dataclass(frozen=True)
class Restart:
    """A later start of a run's training.

    Attributes:
        time: when it started, in seconds since the epoch.
        step: step of the checkpoint that it continued from; None if it ended before.
        job_id: its Slurm job; empty without Slurm.
        host: the host of rank 0.
        reason: why the previous start ended; None if it was not recorded.
    """

    time: float
    step: int | None
    job_id: str
    host: str
    reason: End | None


def list_restarts(layout: RunLayout) -> list[Restart]:
    """Return all starts of a run's training but the first, oldest first."""
    records = [record for record in read_outline(layout.metrics) if isinstance(record, StartRecord)]
    manifest = read_json_if_valid(layout.manifest, dict[str, Any]) or {}
    listed = manifest.get("starts")
    starts = [each for each in listed if _is_start(each)] if isinstance(listed, list) else []
    if not starts:
        return []
    ends = [*(start["time"] for start in starts[1:]), float("inf")]
    return [
        Restart(
            start["time"],
            next((record.resumed_from for record in records if start["time"] <= record.time < end), None),
            str(start.get("job_id", "")),
            str(start.get("host", "")),
            End.from_json(start.get("after")),
        )
        for start, end in list(zip(starts, ends, strict=True))[1:]
    ]


def _is_start(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("time"), float)


def list_anomalies(layout: RunLayout) -> list[AnomalyRecord]:
    """Return the anomalous steps in order; a repeated step only once."""
    found = {(each.step, each.kind): each for each in read_outline(layout.metrics) if isinstance(each, AnomalyRecord)}
    return [found[key] for key in sorted(found)]


def seconds_left(summary: TrainingSummary, log_every_steps: int) -> float | None:
    """Return the remaining time at the speed of the last steps, without checkpoints and evaluations; None if unknown.

    The first record of a start says little: it includes compiling.
    """
    last, begun_at = summary.last_step, summary.start.resumed_from if summary.start else 0
    first = (begun_at // log_every_steps + 1) * log_every_steps if begun_at else 1
    if last is None or summary.end or begun_at < last.step <= first:
        return None
    return (last.num_steps - last.step) * last.step_seconds


@dataclass(frozen=True)
class Silence:
    """A running job that has written no record for some time.

    Attributes:
        seconds: since the last record.
        is_stalled: whether that is much longer than the run's pace explains.
        is_alive: whether its trainer still renews its lease.
    """

    seconds: float
    is_stalled: bool
    is_alive: bool


def measure_silence(layout: RunLayout, seen: Job, log_every_steps: int, now: float) -> Silence | None:
    """Return how long a running job has written no record; None if it does not run, or has ended its training.

    Args:
        layout: the run's folder.
        seen: the run's observed state.
        log_every_steps: steps between records.
        now: in seconds since the epoch.
    """
    last = read_last_record(layout.metrics)
    if seen.state is not RunState.RUNNING or last is None or isinstance(last, EndRecord):
        return None
    limit = _STAGE_STALL_SECONDS
    if isinstance(last, StepRecord):
        limit = max(_MIN_STALL_SECONDS, _STALLED_STEPS * log_every_steps * last.step_seconds)
    seconds = max(0.0, now - max(last.time, seen.started or 0.0))
    return Silence(seconds, seconds > limit, current_holder(layout) is not None)


def excluded_nodes(layout: RunLayout) -> dict[str, str]:
    """Return the nodes that preflights have excluded so far, with the reason."""
    try:
        lines = read_small(layout.excluded_nodes).decode(errors="replace").splitlines()
    except OSError:
        return {}
    rows = (line.split("\t", 3) for line in lines)  # time, job, node, reason
    return {row[2]: row[3] for row in rows if len(row) == 4}  # noqa: PLR2004
