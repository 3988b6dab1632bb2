from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING

from ftkit.runs.failure import RankError, read_rank_error, write_rank_error
from ftkit.runs.metrics_file import (
    MAX_LINE_BYTES,
    RecordTail,
    append_record,
    read_evaluations,
    read_last_record,
    read_last_step,
    read_records,
)
from ftkit.runs.records import (
    EvaluationRecord,
    RouterStats,
    Sample,
    SourceLoss,
    StageRecord,
    StepRecord,
    from_line,
    to_line,
)

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

STEP = StepRecord(1.0, 10, 400, 0.5, 1.5, 1e-3, 1.0, 81920, 40960, 1e4, 0.5, 0.1, 0.0, None, None)
STAGE = StageRecord(0.0, "packing")


def evaluation(num_samples: int) -> EvaluationRecord:
    samples = tuple(Sample("question " * 20, "SELECT", f"SELECT {index}", True) for index in range(num_samples))
    return EvaluationRecord(2.0, 10, "after", 1.0, 2.7, samples, scores={"sql": 0.5})


def test_a_record_round_trips_through_its_line() -> None:
    mixed = replace(STEP, sources={"chats.jsonl": SourceLoss(1.25, 300), "data-set": SourceLoss(2.5, 100)})
    routed = replace(STEP, routers=RouterStats(2.5, 1.5, 0.25, None, None))
    for record in (STEP, mixed, routed, STAGE, evaluation(3)):
        assert from_line(to_line(record)) == record
    assert "sources" not in to_line(STEP) + to_line(evaluation(3)), "the loss of a single source is that of the step"
    assert "routers" not in to_line(STEP)


def test_lines_that_are_not_records_yield_none() -> None:
    for line in ("", "{", "[]", "1", '{"event": "novelty"}', '{"event": "step"}', to_line(STEP)[:-5]):
        assert from_line(line) is None
    assert from_line(to_line(STEP)[:-1] + ', "novelty": 1}') == STEP
    assert from_line(to_line(evaluation(1))[:-1] + ', "execution_accuracy": 0.5}') == evaluation(1)  # ftkit 0.1


def test_the_last_step_is_found_before_records_larger_than_the_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftkit.runs.metrics_file._TAIL_BYTES", 16)
    path = tmp_path / "metrics.jsonl"
    for record in (STAGE, STEP, evaluation(50), STAGE):
        append_record(path, record)
    assert read_last_step(path) == STEP
    assert read_last_record(path) == STAGE
    assert [*read_records(path)][2] == evaluation(50)


def test_the_last_record_may_be_larger_than_the_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftkit.runs.metrics_file._TAIL_BYTES", 16)
    path = tmp_path / "metrics.jsonl"
    append_record(path, evaluation(50))
    assert read_last_record(path) == evaluation(50)
    assert read_last_step(path) is None


def test_a_line_that_is_still_being_written_is_not_the_last_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_record(path, STEP)
    with path.open("a") as file:
        file.write(to_line(STAGE)[:10])
    assert read_last_record(path) == STEP


def test_a_missing_or_empty_file_has_no_records(tmp_path: Path) -> None:
    assert read_last_record(tmp_path / "none") is None
    assert read_last_step(tmp_path / "none") is None
    (tmp_path / "empty").touch()
    assert read_last_record(tmp_path / "empty") is None
    assert list(RecordTail(tmp_path / "none").read_new()) == []


def test_a_tail_reads_each_record_once_and_completely(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = RecordTail(path)
    append_record(path, STAGE)
    assert list(tail.read_new()) == [STAGE]
    line = to_line(STEP) + "\n"
    with path.open("a") as file:
        file.write(line[:20])
        file.flush()
        assert list(tail.read_new()) == []
        file.write(line[20:])
    assert list(tail.read_new()) == [STEP]
    assert list(tail.read_new()) == []


def test_a_rank_error_round_trips_through_its_file(tmp_path: Path) -> None:
    try:
        int("no")
    except ValueError as error:
        left = RankError.from_exception(error, rank=3)
    write_rank_error(tmp_path / "logs" / "error-00003.json", left)
    assert read_rank_error(tmp_path / "logs" / "error-00003.json") == left
    assert "ValueError: invalid literal" in left.traceback
    assert read_rank_error(tmp_path / "none") is None


def test_damaged_or_overlong_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    step = (to_line(STEP) + "\n").encode()
    damaged = [
        b"[" * 100_000,
        b'{"event": "step", "step": "\\ud800"}',
        b"\xff",
        step[:-20],
        b"x" * (MAX_LINE_BYTES + 9),
    ]
    path.write_bytes(step + b"\n".join(damaged) + b"\n" + step)
    assert read_records(path) == [STEP, STEP]
    assert list(RecordTail(path).read_new()) == [STEP, STEP]
    assert read_last_step(path) == STEP
    for value in ("1e400", "-1", "9" * 400, '"x"', "[]", "null"):
        assert from_line(to_line(STEP).replace('"num_steps": 400', f'"num_steps": {value}')) is None
        assert from_line(to_line(STEP).replace('"step_seconds": 0.5', f'"step_seconds": {value}')) is None


def test_reading_the_evaluations_of_a_long_run_takes_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = to_line(STEP) + "\n"
    evaluation = EvaluationRecord(1.0, 400, "after", 6.0, 812.5, ())
    path.write_text(to_line(STAGE) + "\n" + line * (2**22 // len(line)) + to_line(evaluation) + "\n")
    tracemalloc.start()
    found = read_evaluations(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [evaluation]
    assert peak < 2**20


def test_a_tail_that_skips_existing_records_reads_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_record(path, STAGE)
    tail = RecordTail(path, skips_old=True)
    append_record(path, STEP)
    assert list(tail.read_new()) == [STEP]
