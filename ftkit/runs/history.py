"""The history of a run: steps, starts, stages, time by activity, time left, and stalls."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from ftkit.runs.ends import End
from ftkit.runs.job import Job, RunState
from ftkit.runs.lease import current_holder
from ftkit.runs.manifest import Start, read_starts
from ftkit.runs.metrics_file import read_last_record, read_last_step, scan_records
from ftkit.runs.records import (
    AnomalyRecord,
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    FailedCheckpointRecord,
    FirstStepRecord,
    MemoryRecord,
    Record,
    ScriptStepRecord,
    ShardingRecord,
    StartRecord,
    StepRecord,
    VerificationRecord,
)
from ftkit.runs.script_log import read_script_step
from ftkit.runs.spans import Span, Timeline

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout

RecordT = TypeVar("RecordT", bound=Record)

_MIN_STALL_SECONDS = 300.0  # clocks of nodes can differ by minutes
_STAGE_STALL_SECONDS = 1800.0
"""Limit in stages without records: loading weights, compiling, evaluating and exporting."""
_STALLED_STEPS = 10  # missed records after which a run counts as stalled


@dataclass(frozen=True)
class Restart:
    """A later start of a run's training."""

    time: float
    step: int | None  # of the checkpoint that it continued from; None if it ended earlier
    job_id: str  # of Slurm; empty without it
    host: str  # of rank 0
    reason: End | None  # why the previous start ended; None if it was not recorded


@dataclass(frozen=True)
class RunSummary:
    """A summary of a run's records, without steps between the first and the last; None for values without a record."""

    starts: tuple[StartRecord, ...] = ()
    restarts: tuple[Restart, ...] = ()
    first_step: StepRecord | None = None
    last_step: StepRecord | None = None
    memory: tuple[MemoryRecord, ...] = ()  # per stage, the record with the highest peak
    checks: VerificationRecord | None = None
    start_up: FirstStepRecord | None = None  # of the last start
    evaluations: tuple[EvaluationRecord, ...] = ()
    checkpoint: CheckpointRecord | None = None
    failed_checkpoint: FailedCheckpointRecord | None = None  # if newer than the newest complete checkpoint
    anomalies: tuple[AnomalyRecord, ...] = ()  # in the order of steps
    end: EndRecord | None = None
    sharding: ShardingRecord | None = None  # of a script's model
    script_step: ScriptStepRecord | None = None
    problem: str = ""  # which records can't be read, and why

    @property
    def start(self) -> StartRecord | None:
        return self.starts[-1] if self.starts else None

    @property
    def before(self) -> EvaluationRecord | None:
        return next((each for each in self.evaluations if each.when == "before"), None)

    @property
    def after(self) -> EvaluationRecord | None:
        return next((each for each in reversed(self.evaluations) if each.when == "after"), None)

    @property
    def last_evaluation(self) -> EvaluationRecord | None:
        """The evaluation after training, or of the highest step so far."""
        return max(self.evaluations, key=lambda each: (each.when == "after", each.step), default=None)

    @property
    def peak_gib(self) -> float | None:
        """The peak of device memory, the largest over ranks and stages."""
        return max((each.largest_peak_gib for each in self.memory), default=None)

    def seconds_left(self, log_every_steps: int) -> float | None:
        """Return the time left at the speed of the last steps, without checkpoints and evaluations; None if unknown."""
        last, begun_at = self.last_step, self.start.resumed_from if self.start else 0
        first = (begun_at // log_every_steps + 1) * log_every_steps if begun_at else 1
        if last is None or self.end or begun_at < last.step <= first:
            return None
        return (last.num_steps - last.step) * last.step_seconds


@dataclass(frozen=True)
class History(RunSummary):
    """The records of a run, in the order of time. A repeated step occurs once."""

    steps: dict[int, StepRecord] = field(default_factory=dict)
    steady: tuple[StepRecord, ...] = ()  # for the throughput; without the first of each start: it compiles, allocates
    speeds: tuple[float, ...] = ()  # tokens per second per process in `steady`
    records: tuple[Record, ...] = ()  # all, in the order of the file, without evaluations by separate jobs
    start_times: tuple[float, ...] = ()  # of the processes of each start, according to the manifest
    training_seconds: float | None = None  # of all starts; of one without an end, from first to last record

    @property
    def speed(self) -> float | None:
        return median(self.speeds) if self.speeds else None

    @property
    def speed_curve(self) -> tuple[list[int], list[float]]:
        """The tokens after each record in `steady`, and its speed, without steps that a later start repeated."""
        both = zip(self.steady, self.speeds, strict=True)
        kept = [(each.tokens, speed) for each, speed in both if self.steps.get(each.step) is each]
        return [tokens for tokens, _ in kept], [speed for _, speed in kept]

    @property
    def mfu(self) -> float | None:
        found = [each.mfu for each in self.steady if each.mfu is not None]
        return median(found) if found else None

    @cached_property
    def _timeline(self) -> Timeline:
        timeline = Timeline(self.start_times)
        for record in self.records:
            timeline.add(record)
        return timeline

    @property
    def spans(self) -> list[Span]:
        """The time by activity, without gaps."""
        return self._timeline.spans

    @property
    def process_seconds(self) -> float | None:
        """Seconds in which the run occupied its processes, times their number in each start, for the cost."""
        return self._timeline.process_seconds() if self.starts else None

    @property
    def held_seconds(self) -> float | None:
        """Seconds in which the run occupied its processes, including start-up and repeated steps."""
        return sum(span.seconds for span in self.spans if span.kind != "down") if self.starts else None

    def tokens_at(self, step: int) -> float:
        """Return the tokens after a step, for a chart; interpolated linearly between two records."""
        later = bisect_left(known := list(self.steps), step)
        right = self.steps[known[min(later, len(known) - 1)]] if known else None
        if right is None or right.step <= step:
            return right.tokens if right else 0.0
        left = self.steps[known[later - 1]] if later else None
        begin, tokens = (left.step, left.tokens) if left else (0, 0)
        return tokens + (right.tokens - tokens) * (step - begin) / (right.step - begin)

    @property
    def time_use(self) -> dict[str, float]:
        """Seconds by activity; the time of steps is split by the ratios in their records."""
        found: Counter[str] = Counter()
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
            found.update(parts)
        return dict(found)


def read_history(layout: RunLayout) -> History:
    """Read a run's history from the files in its folder. Damaged records are skipped."""
    found: list[Record] = []
    problem = scan_records(layout.metrics, records=found)
    return _history_of(layout, found, problem)


def read_summary(layout: RunLayout) -> RunSummary:
    """Read a run's history without the steps between the first of each start and the last; six times as fast."""
    found: list[Record] = []
    problem = scan_records(layout.metrics, records=found, skips_steps=True)
    if (last_step := read_last_step(layout.metrics)) and last_step not in found:
        found.append(last_step)
    history = _history_of(layout, found, problem)
    return RunSummary(**{each.name: getattr(history, each.name) for each in fields(RunSummary)})


def _history_of(layout: RunLayout, found: list[Record], problem: str) -> History:
    records = tuple(each for each in found if not (isinstance(each, EvaluationRecord) and each.when == "job"))
    manifest_starts = read_starts(layout)
    steps: dict[int, StepRecord] = {}
    steady: list[tuple[StepRecord, float]] = []
    trained: list[tuple[float, float]] = []
    memory: dict[str, MemoryRecord] = {}
    newest: dict[type[object], Record] = {}
    num_processes = 1
    is_first = True
    for record in records:
        newest[type(record)] = record
        match record:
            case StartRecord():
                newest.pop(EndRecord, None)  # the run continues after the end of an earlier start
                trained.append((record.time, record.time))
                steps = {step: each for step, each in steps.items() if step <= record.resumed_from}
                num_processes, is_first = max(1, record.world_size), True
            case StepRecord():
                steps[record.step] = record
                if not is_first:
                    steady.append((record, record.tokens_per_second / num_processes))
                is_first = False
            case MemoryRecord():
                known = memory.get(record.stage, record)
                memory[record.stage] = max(record, known, key=lambda each: each.largest_peak_gib)
            case CheckpointRecord():
                newest.pop(FailedCheckpointRecord, None)
        if trained and isinstance(record, EndRecord):
            trained[-1] = (record.time - record.training_seconds, record.time)
        elif trained and isinstance(record, StepRecord | EvaluationRecord):
            trained[-1] = (trained[-1][0], max(trained[-1][1], record.time))
    checkpoint, end = _newest(newest, CheckpointRecord), _newest(newest, EndRecord)
    export = str(layout.export) if layout.export.is_dir() else None  # `resume --from` does not bring it here
    starts = _all(records, StartRecord)
    anomalies = {(each.step, each.kind): each for each in _all(records, AnomalyRecord)}
    return History(
        starts=starts,
        restarts=_restarts(manifest_starts, starts),
        first_step=steps[min(steps)] if steps else None,
        last_step=steps[max(steps)] if steps else None,
        steps=dict(sorted(steps.items())),
        steady=tuple(record for record, _ in steady),
        speeds=tuple(speed for _, speed in steady),
        memory=tuple(memory.values()),
        checks=_newest(newest, VerificationRecord),
        start_up=_newest(newest, FirstStepRecord),
        evaluations=_all(found, EvaluationRecord),
        checkpoint=checkpoint and replace(checkpoint, path=str(layout.checkpoint(checkpoint.step))),
        failed_checkpoint=_newest(newest, FailedCheckpointRecord),
        anomalies=tuple(anomalies[key] for key in sorted(anomalies)),
        end=replace(end, export=export) if end and end.export else end,
        sharding=_newest(newest, ShardingRecord),
        script_step=read_script_step(layout) if layout.is_script else None,
        records=records,
        start_times=tuple(time for time, _ in manifest_starts),
        training_seconds=sum(end - begin for begin, end in trained) if trained else None,
        problem=problem,
    )


def _newest(newest: Mapping[type[object], Record], kind: type[RecordT]) -> RecordT | None:
    record = newest.get(kind)
    return record if isinstance(record, kind) else None


def _all(records: Sequence[Record], kind: type[RecordT]) -> tuple[RecordT, ...]:
    return tuple(each for each in records if isinstance(each, kind))


def _restarts(starts: Sequence[Start], records: Sequence[StartRecord]) -> tuple[Restart, ...]:
    return tuple(
        Restart(
            time,
            next((record.resumed_from for record in records if time <= record.time < end), None),
            str(start.get("job_id", "")),
            str(start.get("host", "")),
            End.from_json(start.get("after")),
        )
        for (time, start), (end, _) in list(pairwise([*starts, (math.inf, {})]))[1:]
    )


# --- Stalls --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Silence:
    """A running job that has written no record for some seconds."""

    seconds: float
    is_stalled: bool  # the silence is much longer than the run's pace explains
    is_alive: bool  # its trainer still renews its lease


def measure_silence(layout: RunLayout, seen: Job, log_every_steps: int, now: float) -> Silence | None:
    """Return how long a running job has written no record; None if it does not run or has ended training."""
    last = read_last_record(layout.metrics)
    if seen.state is not RunState.RUNNING or last is None or isinstance(last, EndRecord):
        return None
    limit = _STAGE_STALL_SECONDS
    if isinstance(last, StepRecord):
        limit = max(_MIN_STALL_SECONDS, _STALLED_STEPS * log_every_steps * last.step_seconds)
    seconds = max(0.0, now - max(last.time, seen.started or 0.0))
    return Silence(seconds, seconds > limit, current_holder(layout) is not None)
