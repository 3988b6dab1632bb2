"""The history of a run: its steps, its stages, and its time by activity."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from ftkit.files import read_json_if_valid
from ftkit.runs.metrics_file import CheckedRecords
from ftkit.runs.records import (
    AnomalyRecord,
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    FirstStepRecord,
    MemoryRecord,
    StageRecord,
    StartRecord,
    StepRecord,
    VerificationRecord,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftkit.planning.layout import RunLayout
    from ftkit.runs.records import Record

SpanKind = Literal["start-up", "training", "repeated", "evaluation", "checkpoint", "other", "down"]
"""`repeated`: steps after the newest checkpoint of an interrupted start, which the next start repeats."""


@dataclass(frozen=True)
class Span:
    """An interval of a run's time.

    Attributes:
        begin: in seconds since the epoch, as `end`.
        label: the stage, or the steps.
    """

    kind: SpanKind
    begin: float
    end: float
    label: str = ""
    step: int = 0

    @property
    def seconds(self) -> float:
        """Length of the interval in seconds."""
        return max(0.0, self.end - self.begin)


@dataclass(frozen=True)
class History:
    """The records of a run, in the order of time.

    Attributes:
        steps: records by step; a repeated step occurs once.
        steady: the records for the throughput: all but the first of each start, which compiles and allocates.
        speeds: tokens per second of one process in these records.
        memory: the record with the highest peak of each stage.
        spans: the time by activity, without gaps.
    """

    starts: tuple[StartRecord, ...] = ()
    steps: dict[int, StepRecord] = field(default_factory=dict)
    steady: tuple[StepRecord, ...] = ()
    speeds: tuple[float, ...] = ()
    memory: tuple[MemoryRecord, ...] = ()
    checks: VerificationRecord | None = None
    first_step: FirstStepRecord | None = None
    """Of the last start."""
    evaluations: tuple[EvaluationRecord, ...] = ()
    anomalies: tuple[AnomalyRecord, ...] = ()
    end: EndRecord | None = None
    spans: tuple[Span, ...] = ()
    process_seconds: float | None = None
    """Seconds in which the run occupied its processes, times their number in each start: those that cost."""
    training_seconds: float | None = None
    """Between the first and the last record of each start's training, without the time in the queue."""
    problem: str = ""
    """Which records can't be read, and why; empty if all can."""

    @property
    def last_step(self) -> StepRecord | None:
        """The newest step."""
        return next(reversed(self.steps.values()), None)

    @property
    def last_evaluation(self) -> EvaluationRecord | None:
        """The evaluation after training, or of the highest step so far."""
        return max(self.evaluations, key=lambda each: (each.when == "after", each.step), default=None)

    @property
    def speed(self) -> float | None:
        """The median of the tokens per second of one process."""
        return median(self.speeds) if self.speeds else None

    @property
    def speed_curve(self) -> tuple[list[int], list[float]]:
        """The tokens after each of the records for the throughput, and its speed; without steps that were repeated."""
        both = zip(self.steady, self.speeds, strict=True)
        kept = [(each.tokens, speed) for each, speed in both if self.steps.get(each.step) is each]
        return [tokens for tokens, _ in kept], [speed for _, speed in kept]

    @property
    def mfu(self) -> float | None:
        """The median MFU, from 0 to 1."""
        found = [each.mfu for each in self.steady if each.mfu is not None]
        return median(found) if found else None

    @property
    def peak_gib(self) -> float | None:
        """The peak of a device's memory, the largest over ranks and stages."""
        return max((each.largest_peak_gib for each in self.memory), default=None)

    @property
    def held_seconds(self) -> float | None:
        """Seconds in which the run occupied its processes, including start-up and repeated steps."""
        return sum(span.seconds for span in self.spans if span.kind != "down") if self.starts else None

    def tokens_at(self, step: int) -> float:
        """Return the tokens after a step, for a place in a chart: between two records, in proportion to the steps."""
        later = bisect_left(known := list(self.steps), step)
        right = self.steps[known[min(later, len(known) - 1)]] if known else None
        if right is None or right.step <= step:
            return right.tokens if right else 0.0
        left = self.steps[known[later - 1]] if later else None
        begin, tokens = (left.step, left.tokens) if left else (0, 0)
        return tokens + (right.tokens - tokens) * (step - begin) / (right.step - begin)

    @property
    def time_use(self) -> dict[str, float]:
        """Seconds by activity; the time of steps is divided according to their records."""
        found: dict[str, float] = {}
        for span in self.spans:
            parts: dict[str, float] = {span.kind: span.seconds}
            record = self.steps.get(span.step)
            if span.kind == "training" and record:
                wait, overhead = (min(1.0, max(0.0, part)) for part in (record.data_wait_ratio, record.overhead_ratio))
                parts = {
                    "training": span.seconds * (1 - max(wait, overhead)),
                    "data wait": span.seconds * wait,
                    "other": span.seconds * max(0.0, overhead - wait),
                }
            for name, seconds in parts.items():
                found[name] = found.get(name, 0.0) + seconds
        return found


def read_history(layout: RunLayout) -> History:
    """Read the history of a run from its folder. Missing or damaged records are skipped."""
    read = CheckedRecords(layout.metrics)
    records = list(read)
    timeline = _Timeline(_start_times(layout))
    starts: list[StartRecord] = []
    steps: dict[int, StepRecord] = {}
    steady: list[tuple[StepRecord, float]] = []
    trained: list[tuple[float, float]] = []
    memory: dict[str, MemoryRecord] = {}
    is_first = True
    for record in records:
        if isinstance(record, EvaluationRecord) and record.when == "job":
            continue  # another job's time
        timeline.add(record)
        if isinstance(record, StartRecord):
            starts.append(record)
            trained.append((record.time, record.time))
            steps = {step: each for step, each in steps.items() if step <= record.resumed_from}
            is_first = True
        elif isinstance(record, StepRecord):
            steps[record.step] = record
            if not is_first:
                steady.append((record, record.tokens_per_second / max(1, starts[-1].world_size if starts else 1)))
            is_first = False
        elif isinstance(record, MemoryRecord):
            known = memory.get(record.stage, record)
            memory[record.stage] = max(record, known, key=lambda each: each.largest_peak_gib)
        if trained and isinstance(record, StepRecord | EvaluationRecord | EndRecord):
            trained[-1] = (trained[-1][0], max(trained[-1][1], record.time))
    verifications = [each for each in records if isinstance(each, VerificationRecord)]
    ends = [each for each in records if isinstance(each, EndRecord | StartRecord)]
    last = ends[-1] if ends else None
    return History(
        starts=tuple(starts),
        steps=dict(sorted(steps.items())),
        steady=tuple(record for record, _ in steady),
        speeds=tuple(speed for _, speed in steady),
        memory=tuple(memory.values()),
        checks=verifications[-1] if verifications else None,
        first_step=next((each for each in reversed(records) if isinstance(each, FirstStepRecord)), None),
        evaluations=tuple(each for each in records if isinstance(each, EvaluationRecord)),
        anomalies=tuple(each for each in records if isinstance(each, AnomalyRecord)),
        end=last if isinstance(last, EndRecord) else None,
        spans=tuple(timeline.spans),
        process_seconds=timeline.process_seconds() if starts else None,
        training_seconds=sum(end - begin for begin, end in trained) if trained else None,
        problem=read.problem,
    )


def _start_times(layout: RunLayout) -> list[float]:
    """Return when the processes of each start began, from the manifest."""
    manifest = read_json_if_valid(layout.manifest, dict[str, Any]) or {}
    starts = manifest.get("starts")
    found = [each.get("time") for each in starts if isinstance(each, dict)] if isinstance(starts, list) else []
    return sorted(time for time in found if isinstance(time, float))


class _Timeline:
    """Divides a run's time into spans, record by record."""

    def __init__(self, start_times: Sequence[float]) -> None:
        self.spans: list[Span] = []
        self._start_times = list(start_times)
        self._cursor: float | None = None
        self._stage = ""
        self._stalled = 0.0
        self._step = 0
        self._has_started = False
        self._begin_of_start = 0
        self._sizes: dict[int, int] = {}
        """Number of processes of each start, by the index of its first span."""

    def process_seconds(self) -> float:
        """Return the seconds without downtime, times the processes: of the start before for one that never trained."""
        total, size = 0.0, next(iter(self._sizes.values()), 0)
        for index, span in enumerate(self.spans):
            size = self._sizes.get(index, size)
            total += size * span.seconds * (span.kind != "down")
        return total

    def add(self, record: Record) -> None:
        """Add the time between the last record and this one."""
        self._begin_start(record.time)
        if self._cursor is None:
            self._cursor = record.time
        match record:
            case StageRecord():
                self._close(record.time)
                self._stage = record.stage
            case StartRecord():
                self._close(record.time)
                self._mark_repeated_after(record.resumed_from)
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
            case _:
                pass

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
        """End the activity that began at the cursor."""
        if self._cursor is not None and time > self._cursor:
            kind: SpanKind = "other" if not self._stage else "start-up"
            if self._stage.startswith("evaluating"):
                kind = "evaluation"
            elif self._step and self._stage:
                kind = "other"
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

    def _mark_repeated_after(self, step: int) -> None:
        """Mark the steps after the checkpoint that a start continues from as repeated."""
        self.spans = [
            replace(span, kind="repeated") if span.kind == "training" and span.step > step else span
            for span in self.spans
        ]


def merge_spans(spans: Sequence[Span], shortest: float = 0.0) -> list[Span]:
    """Merge neighboring spans of one kind; spans shorter than `shortest` seconds are merged with each other.

    A merged group has the kind that takes most of its time. A group that stays shorter joins the span before it.
    """
    merged: list[Span] = []
    short: list[Span] = []

    def join(span: Span) -> None:
        if merged and (merged[-1].kind == span.kind or span.seconds < shortest):
            merged[-1] = replace(merged[-1], end=span.end, step=span.step)
        else:
            merged.append(span)

    def join_short() -> None:
        if short:
            seconds: Counter[SpanKind] = Counter()
            for each in short:
                seconds[each.kind] += each.seconds  # type: ignore[assignment] # counts may be floats
            join(replace(short[-1], kind=max(seconds, key=seconds.__getitem__), begin=short[0].begin))
            short.clear()

    for span in spans:
        if span.seconds >= shortest:
            join_short()
            join(span)
        else:
            short.append(span)
            if span.end - short[0].begin >= shortest:
                join_short()
    join_short()
    return merged
