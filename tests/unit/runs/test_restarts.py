"""Restarts, remaining time, and stalled runs."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.runs.ends import End
from ftkit.runs.failure import RankError, write_rank_error
from ftkit.runs.history import measure_silence, read_history
from ftkit.runs.job import Cause, Job, RunState
from ftkit.runs.manifest import explain_missing_digests, record_start
from ftkit.runs.records import StageRecord, StartRecord

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunMaker

RUNNING = Job("7", RunState.RUNNING)


def start(when: float, resumed_from: int) -> StartRecord:
    return StartRecord(when, 400, resumed_from, 2, "fsdp2", "cpu", 1000, {"torch": "2"})


def test_each_restart_has_its_step_and_the_reason_of_the_previous_end(
    make_run: RunMaker, records: Any, tmp_path: Path
) -> None:
    run = make_run()
    layout = run.layout
    layout.manifest.write_text("{}")
    none = tmp_path / "no-image"
    record_start(layout.manifest, none)
    record_start(layout.manifest, none)  # killed immediately
    records.write(run, records.step(1), replace(records.end("stopped", 1), time=time.time()))
    record_start(layout.manifest, none)
    begun = json.loads(layout.manifest.read_text())["starts"][-1]["time"]
    records.write(run, start(begun, 1))
    error = RankError(begun, 3, "n7", "RuntimeError", "NCCL: unhandled\nsystem error", "", 1)
    write_rank_error(layout.rank_error(3), error)
    record_start(layout.manifest, none)
    write_rank_error(
        layout.rank_error(3), replace(error, time=time.time(), message="Read error: Connection reset by peer")
    )
    record_start(layout.manifest, none)
    killed = replace(error, time=time.time(), type="SIGKILL", message="rank 3 was killed by SIGKILL")
    write_rank_error(layout.rank_error(3), killed)
    record_start(layout.manifest, none)
    restarts = read_history(layout).restarts
    assert (restarts[0].step, restarts[0].reason and restarts[0].reason.cause) == (None, Cause.UNKNOWN)
    assert [(each.step, each.reason) for each in restarts[1:]] == [
        (1, End(Cause.STOP_REQUEST)),
        (None, End(Cause.ERROR, "rank 3 on n7: RuntimeError: NCCL: unhandled system error")),
        (None, End(Cause.LOST_PEERS, "rank 3 on n7: RuntimeError: Read error: Connection reset by peer")),
        (None, End(Cause.KILLED, "rank 3 on n7: SIGKILL: rank 3 was killed by SIGKILL")),
    ]


@pytest.mark.parametrize(("outcome", "cause"), [("completed", Cause.MORE_STEPS), ("stopped", Cause.STOP_REQUEST)])
def test_data_prepared_before_the_next_start_does_not_hide_how_the_last_one_ended(
    outcome: str, cause: Cause, make_run: RunMaker, records: Any, tmp_path: Path
) -> None:
    run = make_run()
    run.layout.manifest.write_text("{}")
    record_start(run.layout.manifest, tmp_path / "no-image")
    ended = replace(records.end(outcome, 1), time=time.time())
    records.write(run, records.step(1), ended, StageRecord(time.time(), "preparing the data"))
    record_start(run.layout.manifest, tmp_path / "no-image")
    assert [each.reason for each in read_history(run.layout).restarts] == [End(cause)]


def test_the_remaining_time_is_estimated_from_the_last_steps(make_run: RunMaker, records: Any) -> None:
    run = make_run()
    assert read_history(run.layout).seconds_left(10) is None
    records.write(run, records.step(100, step_seconds=2.0))
    assert read_history(run.layout).seconds_left(10) == 600
    records.write(run, records.end("stopped", 100))
    assert read_history(run.layout).seconds_left(10) is None


@pytest.mark.parametrize(("seconds", "is_stalled"), [(299, False), (301, True)])
def test_a_run_stalls_if_it_is_silent_for_longer_than_its_step_time_explains(
    seconds: float, is_stalled: bool, make_run: RunMaker, records: Any
) -> None:
    run = make_run()
    records.write(run, records.step(100))
    silence = measure_silence(run.layout, RUNNING, 10, 110 + seconds)
    assert silence is not None
    assert (silence.seconds, silence.is_stalled, silence.is_alive) == (seconds, is_stalled, False)


def test_long_steps_and_stages_are_not_stalls(make_run: RunMaker, records: Any) -> None:
    run = make_run()
    records.write(run, records.step(100, step_seconds=60.0))
    slow = measure_silence(run.layout, RUNNING, 10, 110 + 5000)
    records.write(run, StageRecord(110.0, "evaluating"))
    stage = measure_silence(run.layout, RUNNING, 10, 110 + 1700)
    assert slow
    assert stage
    assert not slow.is_stalled
    assert not stage.is_stalled
    assert measure_silence(run.layout, Job("7", RunState.PENDING), 10, 1e6) is None


def test_missing_digests_of_a_run_are_explained(make_run: RunMaker) -> None:
    layout = make_run().layout
    assert len(explain_missing_digests(layout)) == 1
    whole = {
        "model": {"weights": "a/b", "revision": "a" * 40},
        "container_image": "/images/x.sqsh",
        "image_sha256": "1",
        "starts": [{"data": {"train": "1", "tokenizer": "2"}}],
    }
    layout.manifest.write_text(json.dumps(whole))
    assert explain_missing_digests(layout) == []
    for change, doubt in {
        "model": ({"weights": "a/b", "revision": "main"}, "model"),
        "image_sha256": (None, "digest of the image"),
        "container_image": (None, "no image"),
        "starts": ([{"data": {"train": "1"}}], "tokenizer"),
    }.items():
        layout.manifest.write_text(json.dumps(whole | {change: doubt[0]}))
        (explained,) = explain_missing_digests(layout)
        assert doubt[1] in explained
    layout.manifest.write_text(json.dumps({"model": 3, "starts": 7, "ftkit": []}))
    assert explain_missing_digests(layout)
