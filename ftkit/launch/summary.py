"""What a run has done so far, read from its folder."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ftkit.records import (
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    RankError,
    StartRecord,
    StepRecord,
    read_rank_error,
    read_records,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.layout import RunLayout
    from ftkit.records import Record

RecordT = TypeVar("RecordT")
_CLOCK_TOLERANCE_SECONDS = 60
_NUM_LOG_LINES = 20


@dataclass(frozen=True)
class TrainingSummary:
    """The records that matter once a run is looked at as a whole; None where there is none yet."""

    start: StartRecord | None = None
    first_step: StepRecord | None = None
    last_step: StepRecord | None = None
    before: EvaluationRecord | None = None
    after: EvaluationRecord | None = None
    checkpoint: CheckpointRecord | None = None
    end: EndRecord | None = None


def summarise(layout: RunLayout) -> TrainingSummary:
    """Read all records of a run."""
    records = read_records(layout.metrics)
    steps = [record for record in records if isinstance(record, StepRecord)]
    evaluations = [record for record in records if isinstance(record, EvaluationRecord)]
    return TrainingSummary(
        start=_last(records, StartRecord),
        first_step=steps[0] if steps else None,
        last_step=steps[-1] if steps else None,
        before=next((record for record in evaluations if record.when == "before"), None),
        after=next((record for record in reversed(evaluations) if record.when == "after"), None),
        checkpoint=_last(records, CheckpointRecord),
        end=_last(records, EndRecord),
    )


def _last(records: list[Record], kind: type[RecordT]) -> RecordT | None:
    return next((record for record in reversed(records) if isinstance(record, kind)), None)


def list_checkpoints(layout: RunLayout) -> list[tuple[int, Path]]:
    """Return the complete checkpoints with their steps, oldest first; incomplete ones have other names."""
    try:
        folders = list(layout.checkpoints.iterdir())
    except OSError:
        return []
    named = [(re.fullmatch(r"step-(\d+)", folder.name), folder) for folder in folders]
    return sorted((int(match[1]), folder) for match, folder in named if match)


def first_error(layout: RunLayout, *, since: float) -> RankError | None:
    """Return the error of the rank that failed first, of those that failed after `since`.

    The others mostly say that they lost the first one.
    """
    errors = [error for path in layout.logs.glob("error-*.json") if (error := read_rank_error(path))]
    recent = [error for error in errors if error.time >= since - _CLOCK_TOLERANCE_SECONDS]
    return min(recent, key=lambda error: error.time, default=None)


def log_tail(layout: RunLayout, num_lines: int = _NUM_LOG_LINES) -> list[str]:
    """Return the last lines of the job's log."""
    try:
        with layout.job_log.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=num_lines)]
    except OSError:
        return []
