"""The lease of a run folder, without real waiting: tests pass their own pause function."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
from waiting import PATIENCE_SECONDS

from ftkit import process
from ftkit.errors import TrainingError
from ftkit.planning.layout import RunLayout
from ftkit.runs.lease import (
    BEAT_SECONDS,
    NUM_MISSED_BEATS,
    FolderHeldError,
    Holder,
    current_holder,
    held_lease,
    is_held_by_another_job,
    revoke,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return RunLayout(tmp_path / "run")


def refuse_to_wait(_seconds: float) -> None:
    pytest.fail("must not wait")


def ignore(_anything: object) -> None:
    """Ignore a message or call."""


def hold(layout: RunLayout, pause: Callable[[float], None] = refuse_to_wait, **others: Any) -> Any:
    return held_lease(layout, pause=pause, **{"say": ignore, "on_loss": ignore, **others})


ELSEWHERE = Holder("n7", "another boot, another namespace", 4711, "1", "55", 0.0)


def leave(layout: RunLayout, holder: Holder, number: int = 1) -> Path:
    """Write a lease that its process did not release."""
    layout.leases.mkdir(parents=True, exist_ok=True)
    path = layout.leases / f"{number:06d}.json"
    path.write_text(json.dumps(asdict(holder)), encoding="utf-8")
    return path


def test_a_second_holder_on_the_same_machine_is_rejected_immediately_with_the_holders_name(layout: RunLayout) -> None:
    with (
        hold(layout),
        pytest.raises(TrainingError, match=f"process {os.getpid()} on {Holder.here().host}"),
        hold(layout),
    ):
        pytest.fail("two processes hold the lease")


def test_a_released_lease_is_free_immediately(layout: RunLayout) -> None:
    with hold(layout):
        assert current_holder(layout) is not None
    assert current_holder(layout) is None
    with hold(layout):
        assert [path.name for path in layout.leases.iterdir()] == ["000002.json"]


def test_an_ended_process_on_this_machine_holds_no_lease(layout: RunLayout) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    leave(layout, replace(Holder.here(), pid=gone.pid))
    assert current_holder(layout) is None
    with hold(layout):
        pass


def test_a_later_process_with_the_same_pid_is_not_the_holder(layout: RunLayout) -> None:
    leave(layout, replace(Holder.here(), process_start="0"))
    assert process.start_time(os.getpid()) != "0"
    with hold(layout):
        pass


def test_an_active_holder_on_another_machine_is_not_replaced(layout: RunLayout) -> None:
    path, told = leave(layout, ELSEWHERE), []

    def touch(_seconds: float) -> None:
        os.utime(path, (1, path.stat().st_mtime + 10))

    with pytest.raises(TrainingError, match="process 4711 on n7"), hold(layout, touch, say=told.append):
        pytest.fail("two processes hold the lease")
    assert "process 4711 on n7" in told[0]
    assert current_holder(layout) == ELSEWHERE


def test_a_silent_holder_on_another_machine_is_replaced(layout: RunLayout) -> None:
    leave(layout, ELSEWHERE, number=9)
    pauses: list[float] = []
    with hold(layout, pauses.append):
        assert len(pauses) == NUM_MISSED_BEATS
        assert [path.name for path in layout.leases.iterdir()] == ["000010.json"], "numbers must not be strings"
        assert current_holder(layout) == replace(Holder.here(), since=current_holder(layout).since)  # type: ignore[union-attr]


def start_as(monkeypatch: pytest.MonkeyPatch, job_id: str, restarts: int, step: int) -> None:
    """Make this process one of a start of a Slurm job."""
    monkeypatch.setenv("SLURM_JOB_ID", job_id)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    monkeypatch.setenv("SLURM_STEP_ID", str(step))


@pytest.mark.parametrize(("restarts", "step"), [(1, 0), (0, 2)])
def test_a_later_start_of_the_same_job_takes_over_after_the_holder_had_time_to_notice(
    restarts: int, step: int, layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    lost: list[TrainingError] = []
    start_as(monkeypatch, "55", 0, 1)
    with hold(layout, on_loss=lost.append) as beat:
        (path,) = layout.leases.iterdir()
        leave(layout, replace(ELSEWHERE, start=(0, 1)))  # as if it were on a node that is cut off
        start_as(monkeypatch, "55", restarts, step)

        def let_it_beat(seconds: float) -> None:
            assert seconds >= 2 * BEAT_SECONDS
            assert not path.exists()
            beat()

        with hold(layout, let_it_beat, say=told.append):
            assert isinstance(lost[0], FolderHeldError)
            assert "process 4711 on n7, since 1970-01-01 00:00:00 UTC" in told[0]


@pytest.mark.parametrize(("job_id", "restarts", "step"), [("55", 0, 1), ("55", 0, 0), ("56", 2, 0), ("", 2, 0)])
def test_the_same_or_an_earlier_start_and_another_job_wait_until_the_holder_is_dead(
    job_id: str, restarts: int, step: int, layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(layout, replace(ELSEWHERE, start=(0, 1)))
    start_as(monkeypatch, job_id, restarts, step)
    pauses: list[float] = []
    with hold(layout, pauses.append):
        assert len(pauses) == NUM_MISSED_BEATS


def test_a_later_start_ends_a_process_of_an_earlier_one_that_still_runs_on_its_machine(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    with subprocess.Popen(["sleep", "60"]) as left:
        start = process.start_time(left.pid) or ""
        leave(layout, replace(Holder.here(), pid=left.pid, process_start=start, job_id="55", start=(0, 1)))
        start_as(monkeypatch, "55", 0, 2)
        with hold(layout, say=told.append):
            assert left.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    assert f"process {left.pid} on" in told[0]


def test_exactly_one_of_several_processes_takes_over_a_dead_lease(layout: RunLayout) -> None:
    leave(layout, ELSEWHERE)

    def another_takes_it(_seconds: float) -> None:
        leave(layout, replace(ELSEWHERE, host="n8"), 2)

    with pytest.raises(TrainingError, match="process 4711 on n8"), hold(layout, another_takes_it):
        pytest.fail("two processes hold the lease")


def test_a_lease_number_just_taken_cannot_be_taken_again(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(layout, replace(ELSEWHERE, host="n8"), 2)
    names = iter([["000001.json"], ["000001.json", "000002.json"]])
    leave(layout, replace(Holder.here(), process_start="0"), 1)
    monkeypatch.setattr(
        "ftkit.runs.lease.os.listdir", lambda _: next(names)
    )  # a stale listing of a network file system
    with pytest.raises(TrainingError, match="on n8"), hold(layout):
        pytest.fail("two processes hold the lease")


def test_a_replaced_holder_is_notified_at_its_next_heartbeat(layout: RunLayout) -> None:
    lost: list[TrainingError] = []
    with hold(layout, on_loss=lost.append) as beat:
        beat()
        assert not lost
        leave(layout, ELSEWHERE, 2)
        beat()
    assert "process 4711 on n7" in str(lost[0])


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_an_unreadable_lease_is_watched_like_any_other(text: str, layout: RunLayout) -> None:
    leave(layout, ELSEWHERE).write_text(text, encoding="utf-8")
    pauses: list[float] = []
    with hold(layout, pauses.append):
        assert len(pauses) == NUM_MISSED_BEATS


def test_a_revoked_lease_is_free_immediately_and_its_holder_is_notified(layout: RunLayout) -> None:
    lost: list[TrainingError] = []
    with hold(layout, on_loss=lost.append) as beat:
        revoke(layout)
        assert current_holder(layout) is None
        beat()
        with hold(layout):
            pass
    assert len(lost) == 1
    revoke(layout)
    assert len(list(layout.leases.iterdir())) == 2, "a released lease must not be revoked"


def test_a_running_process_holds_its_lease_however_old_its_last_heartbeat(layout: RunLayout) -> None:
    with hold(layout):
        (path,) = layout.leases.iterdir()
        os.utime(path, (1, 1))
        assert current_holder(layout) is not None
        with pytest.raises(FolderHeldError), hold(layout):
            pytest.fail("two processes hold the lease")


def test_a_stale_listing_does_not_end_the_holder(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[TrainingError] = []
    with hold(layout, on_loss=lost.append) as beat:
        monkeypatch.setattr("ftkit.runs.lease._numbers", lambda _: [])
        beat()
    assert not lost


def test_a_lease_whose_file_was_removed_is_lost(layout: RunLayout) -> None:
    lost: list[TrainingError] = []
    with hold(layout, on_loss=lost.append) as beat:
        (path,) = layout.leases.iterdir()
        path.unlink()
        beat()
    assert len(lost) == 1


def test_a_folder_without_leases_has_no_holder(layout: RunLayout) -> None:
    assert current_holder(layout) is None


@pytest.mark.parametrize(("own", "is_another"), [("55", False), ("56", True), ("", True)])
def test_a_rank_knows_whether_its_own_job_holds_the_folder(
    own: str, is_another: bool, layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", own)
    assert not is_held_by_another_job(layout)
    leave(layout, ELSEWHERE)
    assert is_held_by_another_job(layout) == is_another
