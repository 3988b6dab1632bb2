from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.planning.layout import RunLayout
from ftkit.runs.checkpoints import FORMAT_VERSION, Marker, SavedFile, TrainState, find_damage, list_checkpoints
from ftkit.runs.ends import excluded_nodes, find_end, log_tail
from ftkit.runs.failure import Failure, RankError, explain_failure, first_error, write_rank_error
from ftkit.runs.gpu_samples import read_samples
from ftkit.runs.history import History, read_history
from ftkit.runs.job import Job, RunState
from ftkit.runs.records import CheckpointRecord, EvaluationRecord, Sample, StartRecord

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import RunMaker


def leave_error(layout: RunLayout, rank: int, time: float, code: int = 1) -> None:
    write_rank_error(layout.rank_error(rank), RankError(time, rank, f"n{rank}", "ValueError", "no", "Traceback", code))


def test_a_run_that_has_not_started_has_an_empty_summary(make_run: RunMaker) -> None:
    summary = read_history(make_run().layout)
    assert summary == History()


def test_first_and_last_values_are_distinguished(make_run: RunMaker, records: Any) -> None:
    run = make_run()
    run.layout.export.mkdir()
    sample = Sample("q", "r", "a", True)
    before = EvaluationRecord(1.0, 0, "before", 6.0, 400.0, ())
    during = EvaluationRecord(2.0, 10, "during", 3.0, 20.0, ())
    after = EvaluationRecord(3.0, 20, "after", 1.0, 2.7, (sample,))
    checkpoint = CheckpointRecord(2.0, 20, "/x/step-000020", 0.5, 0.1)
    records.write(run, before, records.step(1, 6.0), during, records.step(20, 1.0), checkpoint, after, records.end())
    summary = read_history(run.layout)
    assert summary.first_step == records.step(1, 6.0)
    assert summary.last_step == records.step(20, 1.0)
    assert (summary.before, summary.after) == (before, after)
    assert summary.checkpoint == replace(checkpoint, path=str(run.layout.checkpoint(20)))
    assert summary.end == replace(records.end(), export=str(run.layout.export))


def test_a_resumed_run_is_at_its_checkpoint_until_it_records_a_step(make_run: RunMaker, records: Any) -> None:
    run = make_run()
    stopped = records.end("stopped", 25, export=None)
    records.write(run, records.step(1, 6.0), records.step(20, 1.0), records.step(25, 0.5), stopped)
    assert (read_history(run.layout).end, read_history(run.layout).seconds_left(10)) == (stopped, None)
    records.write(run, StartRecord(1e9, 400, 20, 2, "fsdp2", "cpu", 1000, {}))
    summary = read_history(run.layout)
    assert summary.last_step == records.step(20, 1.0)
    assert (summary.end, summary.seconds_left(10)) == (None, 380 * 0.5)
    # The first record of a start includes compiling; the run's next one does not.
    for step, left in ((30, None), (40, 180.0)):
        records.write(run, records.step(step, 0.4))
        assert read_history(run.layout).seconds_left(10) == left
    records.write(run, StartRecord(1e9, 400, 0, 2, "fsdp2", "cpu", 1000, {}))
    assert read_history(run.layout).last_step is None


def test_paths_of_a_moved_run_are_where_its_files_are_now(make_run: RunMaker, records: Any, tmp_path: Path) -> None:
    run = make_run()
    records.write(run, CheckpointRecord(2.0, 20, str(run.layout.checkpoint(20)), 0.5, 0.1), records.end())
    run.layout.export.mkdir()
    moved = RunLayout(run.layout.root.rename(tmp_path / "moved"))
    summary = read_history(moved)
    assert summary.checkpoint is not None
    assert summary.end is not None
    assert summary.checkpoint.path == str(tmp_path / "moved" / "checkpoints" / "step-000020")
    assert summary.end.export == str(tmp_path / "moved" / "export")


def test_an_export_that_is_not_in_the_runs_folder_is_not_shown(make_run: RunMaker, records: Any) -> None:
    run = make_run()
    records.write(run, records.end())
    end = read_history(run.layout).end
    assert end is not None
    assert end.export is None


def test_the_rank_that_failed_first_is_the_cause(make_run: RunMaker) -> None:
    layout = make_run().layout
    for rank, time in ((0, 1005.0), (3, 1001.0), (1, 1003.0)):
        leave_error(layout, rank, time)
    error = first_error(layout, since=1000)
    assert error is not None
    assert (error.rank, error.host) == (3, "n3")


def test_errors_of_an_earlier_start_are_not_the_cause(make_run: RunMaker) -> None:
    layout = make_run().layout
    leave_error(layout, 3, 1000.0)
    leave_error(layout, 1, 9000.0)
    error = first_error(layout, since=8990)
    assert error is not None
    assert error.rank == 1
    assert first_error(layout, since=20_000) is None


def test_an_error_just_before_the_run_was_resumed_does_not_explain_how_the_next_job_ended(make_run: RunMaker) -> None:
    run = make_run()
    leave_error(run.layout, 1, run.submission.submitted - 40, code=8)
    seen = Job(run.job_id, RunState.FAILED, is_final=True, exit_code=4)  # of the job script: its image is missing
    assert explain_failure(run, seen) == Failure(4, None)


def test_a_damaged_rank_error_is_ignored(make_run: RunMaker) -> None:
    layout = make_run().layout
    layout.rank_error(0).write_text("{")
    assert first_error(layout, since=0) is None


def test_only_complete_checkpoints_are_listed_oldest_first(make_run: RunMaker) -> None:
    layout = make_run().layout
    assert list_checkpoints(layout) == []
    for name in ("step-000200", "step-000100", ".step-000300.tmp", "step-000300.tmp", "notes"):
        (layout.checkpoints / name).mkdir(parents=True)
    assert [step for step, _ in list_checkpoints(layout)] == [100, 200]


def test_only_the_end_of_a_log_is_shown(make_run: RunMaker) -> None:
    layout = make_run().layout
    assert log_tail(layout) == []
    layout.job_log.write_bytes(b"\xff\n" + b"".join(b"line %d\n" % number for number in range(100)))
    assert log_tail(layout, 2) == ["line 98", "line 99"]


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("logs/job.log", log_tail),
        ("excluded-nodes.tsv", excluded_nodes),
        ("end-reason", lambda layout: find_end(layout, 0.0)),
        ("gpus/n0.jsonl", read_samples),
    ],
)
def test_a_pipe_in_a_run_folder_is_not_waited_for(
    name: str, read: Callable[[RunLayout], object], make_run: RunMaker
) -> None:
    layout = make_run().layout
    without = read(layout)
    (layout.root / name).parent.mkdir(exist_ok=True)
    os.mkfifo(layout.root / name)
    assert read(layout) == without


def test_a_file_of_another_size_is_damaged_without_being_read(tmp_path: Path) -> None:
    (tmp_path / "shard").touch()
    saved = SavedFile.of(tmp_path / "shard")
    os.truncate(tmp_path / "shard", 2**40)
    marker = Marker(FORMAT_VERSION, TrainState(1, "x"), 1, {"shard": saved})
    assert find_damage(tmp_path, marker, ["shard"]) == ["shard"]
