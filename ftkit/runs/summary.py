"""Summary of a run's progress, read from its folder."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ftkit.files import open_regular
from ftkit.process import without_colors
from ftkit.runs.metrics_file import read_last_step, read_outline
from ftkit.runs.rank_errors import RankError, read_rank_error
from ftkit.runs.records import (
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

_CLOCK_TOLERANCE_SECONDS = 60


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


def first_error(layout: RunLayout, *, since: float) -> RankError | None:
    """Return the error of the rank that failed first, of those that failed after `since`.

    Other ranks mostly report that they lost a peer: these did not fail first, even if their clocks say so.
    """
    try:
        paths = list(layout.logs.glob("error-*.json"))
    except OSError:  # this user may not read it
        return None
    errors = [error for path in paths if (error := read_rank_error(path))]
    recent = [error for error in errors if error.time >= since - _CLOCK_TOLERANCE_SECONDS]
    return min(recent, key=lambda error: (error.reports_lost_peer, error.time), default=None)


def log_tail(layout: RunLayout, num_lines: int | None = 20, num_bytes: int = 2**16) -> list[str]:
    """Return the last lines of the job's log, of at most `num_bytes`; all of these if `num_lines` is null."""
    try:
        with open_regular(layout.job_log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
            text = without_colors(file.read().decode("utf-8", errors="replace"))
            return text.splitlines()[-(num_lines or 0) :]
    except OSError:
        return []
