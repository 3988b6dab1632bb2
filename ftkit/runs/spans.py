"""Divide a run's time by activity: training, checkpoints, evaluations, start-up, and downtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from ftkit.runs.records import (
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    Record,
    StageRecord,
    StartRecord,
    StepRecord,
)

SpanKind = Literal["start-up", "training", "repeated", "evaluation", "checkpoint", "other", "down"]
"""`repeated`: steps of an interrupted start after its newest checkpoint, which the next start repeats."""


@dataclass(frozen=True)
class Span:
    """An interval of a run's time, in seconds since the epoch; the label is the stage, or the steps."""

    kind: SpanKind
    begin: float
    end: float
    label: str = ""
    step: int = 0

    @property
    def seconds(self) -> float:
        return max(0.0, self.end - self.begin)


class Timeline:
    """Divides a run's time into spans, record by record; `start_times` are those of its processes, in order."""

    def __init__(self, start_times: Sequence[float]) -> None:
        self.spans: list[Span] = []
        self._start_times = list(start_times)
        self._cursor: float | None = None
        self._stage = ""
        self._stalled = 0.0
        self._step = 0
        self._has_started = False
        self._begin_of_start = 0
        self._sizes: dict[int, int] = {}  # number of processes of each start, by the index of its first span

    def process_seconds(self) -> float:
        """Return the seconds without downtime, times the processes; those of the start before if one never trained."""
        total, size = 0.0, next(iter(self._sizes.values()), 0)
        for index, span in enumerate(self.spans):
            size = self._sizes.get(index, size)
            total += size * span.seconds * (span.kind != "down")
        return total

    def add(self, record: Record) -> None:
        self._begin_start(record.time)
        if self._cursor is None:
            self._cursor = record.time
        match record:
            case StageRecord():
                self._close(record.time)
                self._stage = record.stage
            case StartRecord():
                self._close(record.time)
                for index, span in enumerate(self.spans):
                    if span.kind == "training" and span.step > record.resumed_from:
                        self.spans[index] = replace(span, kind="repeated")
                begin = self._begin_of_start
                self._sizes[len(self.spans) if begin in self._sizes else begin] = record.world_size
                self._stage, self._step = "", record.resumed_from
            case StepRecord():
                self._add_step(record)
            case EvaluationRecord() | EndRecord():
                self._close(record.time)
                self._stage = ""
            case CheckpointRecord():
                self._stalled += record.stalled_seconds

    def _begin_start(self, time: float) -> None:
        """Add the downtime until the processes were restarted, if that was before `time`."""
        while self._start_times and self._start_times[0] <= time:
            begin = self._start_times.pop(0)
            if self._has_started and self._cursor is not None and begin > self._cursor:
                self.spans.append(Span("down", self._cursor, begin, "between two starts"))
                self._cursor = begin
            self._cursor = begin if self._cursor is None else self._cursor
            self._has_started, self._stalled, self._step, self._begin_of_start = True, 0.0, 0, len(self.spans)
            self._stage = self._stage or "starting processes"

    def _close(self, time: float) -> None:
        if self._cursor is not None and time > self._cursor:
            kind: SpanKind = "start-up" if self._stage and not self._step else "other"
            if self._stage.startswith("evaluating"):
                kind = "evaluation"
            self.spans.append(Span(kind, self._cursor, time, self._stage))
            self._cursor = time

    def _add_step(self, record: StepRecord) -> None:
        begin = record.time if self._cursor is None else self._cursor
        elapsed = max(0.0, record.time - begin)
        stalled = min(self._stalled, elapsed)
        taken = min(elapsed - stalled, max(1, record.step - self._step) * record.step_seconds)
        parts = (("checkpoint", stalled), ("other", elapsed - stalled - taken), ("training", taken))
        for kind, seconds in parts:
            if seconds > 0:
                label = f"to step {record.step}" if kind == "training" else ""
                self.spans.append(Span(kind, begin, begin + seconds, label, record.step))  # type: ignore[arg-type]
                begin += seconds
        self._cursor, self._stalled, self._step, self._stage = max(begin, record.time), 0.0, record.step, ""


def merge_spans(spans: Sequence[Span], shortest: float = 0.0) -> list[Span]:
    """Merge neighboring spans of one kind; spans shorter than `shortest` seconds are merged with each other.

    A merged group has the kind that takes most of its time. A group that stays shorter joins the span before it.
    """
    merged: list[Span] = []

    def group_of(span: Span) -> tuple[bool, float]:
        is_long = span.seconds >= shortest
        return is_long, span.begin if is_long else (span.begin - spans[0].begin) // shortest

    for _, grouped in groupby(spans, group_of):
        group = list(grouped)
        kinds = dict.fromkeys(each.kind for each in group)
        seconds = {kind: sum(each.seconds for each in group if each.kind == kind) for kind in kinds}
        kind, end = max(seconds, key=seconds.__getitem__), group[-1].end
        if merged and (merged[-1].kind == kind or end - group[0].begin < shortest):
            merged[-1] = replace(merged[-1], end=end)
        else:
            merged.append(replace(group[0], kind=kind, end=end))
    return merged
