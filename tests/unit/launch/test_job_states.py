from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.errors import NoAnswerError, SubmitError
from ftkit.files import write_json
from ftkit.launch.job_states import observe, observe_all
from ftkit.launch.submission import cancel, check_removable, resume
from ftkit.planning.layout import Workspace
from ftkit.planning.plan import read_plan
from ftkit.runs.find import find_run
from ftkit.runs.job import RunState, SubmittedRun
from ftkit.runs.lease import Holder

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import FakePrograms, RunMaker


@pytest.fixture
def slurm_says(
    programs: FakePrograms, squeue_line: Callable[..., str], sacct_line: Callable[..., str]
) -> Callable[..., None]:
    """Make squeue and sacct return only these lines."""

    def says(run: SubmittedRun, *, queue: str = "", reason: str = "None", accounting: str = "") -> None:
        programs.answer("squeue", squeue_line(run, queue, reason) if queue else "")
        programs.answer("sacct", sacct_line(run, accounting) if accounting else "")

    return says


def test_a_listed_run_with_a_saved_final_state_is_not_queried_again(
    make_run: RunMaker, programs: FakePrograms, slurm_says: Callable[..., None]
) -> None:
    run = make_run()
    slurm_says(run, accounting="TIMEOUT")
    first = observe(run)
    num_calls = len(programs.calls())
    assert (first.state, first.is_final) == (RunState.TIMED_OUT, True)
    assert observe_all([run]).states == {run.id: first}
    assert len(programs.calls()) == num_calls
    slurm_says(run)  # forgotten
    assert observe(run) == first
    programs.answer("squeue", stderr="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    assert observe_all([run]).states == {run.id: first}
    assert not observe(run).is_final  # it may have been requeued
    with pytest.raises(NoAnswerError):
        resume(read_plan(run.layout), os.environ)


@pytest.mark.parametrize("word", ["OUT_OF_MEMORY", "NODE_FAIL", "TIMEOUT", "FAILED"])
def test_a_completed_run_stays_completed_whatever_slurm_says_of_its_job_afterwards(
    make_run: RunMaker, records: Any, slurm_says: Callable[..., None], word: str
) -> None:
    run = make_run()
    records.write(run, records.step(400), records.end())
    run.layout.job_exit_code(run.job_id).write_text("0\n")
    slurm_says(run, accounting=word)
    assert observe(run).state is RunState.COMPLETED
    with pytest.raises(SubmitError, match="has completed"):
        resume(read_plan(run.layout), os.environ)


def test_an_ended_job_that_was_requeued_by_hand_is_neither_removed_nor_submitted_again(
    make_run: RunMaker, programs: FakePrograms, slurm_says: Callable[..., None]
) -> None:
    run = make_run()
    slurm_says(run, accounting="TIMEOUT")
    assert observe(run).is_final
    slurm_says(run, queue="PENDING", reason="BeginTime")
    folder = find_run(run.id, Workspace(run.layout.root.parent.parent))
    with pytest.raises(SubmitError, match="pending"):
        check_removable(folder)
    with pytest.raises(SubmitError, match="pending"):
        resume(read_plan(run.layout), os.environ)
    programs.answer("scancel")
    assert cancel([run]) == {}
    assert len(programs.calls("scancel")) == 1


def test_a_completed_run_took_the_time_since_its_first_start_and_not_since_its_submission(
    make_run: RunMaker, records: Any
) -> None:
    run = make_run()
    began = run.submission.submitted + 3600
    starts = [{"time": each} for each in (began + 60, began, run.submission.submitted - 60)]
    write_json(run.layout.manifest, {"starts": starts})
    records.write(run, records.end())
    run.layout.job_exit_code(run.job_id).write_text("0\n")
    seen = observe_all([run]).states[run.id]
    assert (seen.started, seen.ended) == (began, records.end().time)


def test_the_end_of_an_earlier_job_is_not_that_of_the_resumed_run(
    make_run: RunMaker, records: Any, slurm_says: Callable[..., None]
) -> None:
    run = make_run()
    records.write(run, replace(records.end("stopped", 120), time=run.submission.submitted - 60))
    run.layout.job_exit_code(run.job_id).write_text("4")
    slurm_says(run, accounting="FAILED")
    assert observe(run).reason == ""


def test_a_run_that_completed_by_its_own_files_needs_no_scheduler(
    make_run: RunMaker, programs: FakePrograms, records: Any
) -> None:
    run = make_run()
    records.write(run, records.step(400), records.end())
    run.layout.job_exit_code(run.job_id).write_text("0\n")
    seen = observe_all([run]).states[run.id]
    assert (seen.state, seen.ended) == (RunState.COMPLETED, records.end().time)
    assert programs.calls() == []


def test_a_run_that_was_submitted_again_is_observed_again(make_run: RunMaker, slurm_says: Callable[..., None]) -> None:
    run = make_run()
    slurm_says(run, accounting="FAILED")
    assert observe(run).state is RunState.FAILED
    again = SubmittedRun(run.layout, replace(run.submission, job_id="999"))
    slurm_says(again, queue="RUNNING")
    assert observe(again).state is RunState.RUNNING


def test_a_run_that_resumes_after_its_end_is_observed_again(
    make_run: RunMaker, records: Any, slurm_says: Callable[..., None]
) -> None:
    run = make_run()
    slurm_says(run, accounting="FAILED")
    observe(run)
    records.write(run, records.step(1))
    later = time.time() + 60
    os.utime(run.layout.metrics, (later, later))
    slurm_says(run, queue="RUNNING")
    assert observe(run).state is RunState.RUNNING


def test_a_checkpointed_run_in_the_queue_is_stopped_but_not_ended(
    make_run: RunMaker, records: Any, slurm_says: Callable[..., None]
) -> None:
    run = make_run()
    records.write(run, records.step(120), records.end("stopped", 120))
    slurm_says(run, queue="PENDING", reason="BeginTime")
    seen = observe(run)
    assert (seen.state, seen.is_final) == (RunState.STOPPED, False)
    assert "checkpoint of step 120" in seen.reason
    assert "BeginTime" in seen.reason
    assert not run.layout.state.exists()


def test_a_stopped_run_that_was_not_requeued_has_ended(
    make_run: RunMaker, records: Any, slurm_says: Callable[..., None]
) -> None:
    run = make_run()
    records.write(run, records.end("stopped", 120))
    run.layout.job_exit_code(run.job_id).write_text("0\n")
    slurm_says(run, accounting="COMPLETED")
    seen = observe(run)
    assert (seen.state, seen.is_final) == (RunState.STOPPED, True)


def test_a_preempted_run_mentions_its_checkpoint(
    make_run: RunMaker, records: Any, slurm_says: Callable[..., None]
) -> None:
    run = make_run()
    records.write(run, records.end("stopped", 120))
    slurm_says(run, accounting="PREEMPTED")
    seen = observe(run)
    assert (seen.state, seen.reason) == (RunState.PREEMPTED, "checkpoint of step 120 written")


@pytest.mark.parametrize("word", ["FAILED", "COMPLETED", "CANCELLED by 0"])
def test_a_run_that_the_user_canceled_is_canceled_however_its_script_ended(
    make_run: RunMaker, slurm_says: Callable[..., None], word: str
) -> None:
    run = make_run()
    run.layout.canceled.touch()
    slurm_says(run, accounting=word)
    assert observe(run).state is RunState.CANCELED


def test_a_canceled_run_is_canceled_if_slurm_forgot_its_job_or_cannot_be_asked(
    make_run: RunMaker, programs: FakePrograms, slurm_says: Callable[..., None]
) -> None:
    run = make_run()
    run.layout.canceled.touch()
    assert observe(run).state is RunState.CANCELED
    assert programs.calls() == []
    slurm_says(run, accounting="")
    assert observe(run).state is RunState.CANCELED


@pytest.mark.parametrize("has_exit_code", [True, False])
def test_a_run_that_completed_just_before_it_was_canceled_is_completed(
    make_run: RunMaker, records: Any, slurm_says: Callable[..., None], *, has_exit_code: bool
) -> None:
    run = make_run()
    records.write(run, replace(records.end(), time=run.submission.submitted + 1))
    if has_exit_code:
        run.layout.job_exit_code(run.job_id).write_text("0\n")
    run.layout.canceled.touch()
    slurm_says(run, accounting="CANCELLED by 0")
    assert observe(run).state is RunState.COMPLETED


def test_a_resumed_run_that_is_canceled_is_not_completed_because_it_was_before(
    make_run: RunMaker, records: Any, slurm_says: Callable[..., None]
) -> None:
    run = make_run()
    records.write(run, replace(records.end(), time=run.submission.submitted - 1))
    run.layout.canceled.touch()
    slurm_says(run, accounting="CANCELLED by 0")
    assert observe(run).state is RunState.CANCELED


@pytest.mark.parametrize(
    ("exit_code", "state"), [("0", RunState.COMPLETED), ("9", RunState.FAILED), (None, RunState.UNKNOWN)]
)
def test_the_exit_code_decides_if_slurm_has_forgotten_the_job(
    make_run: RunMaker, slurm_says: Callable[..., None], exit_code: str | None, state: RunState
) -> None:
    run = make_run()
    run.layout.job_exit_code("999").write_text("3")  # of another, rejected job
    if exit_code:
        run.layout.job_exit_code(run.job_id).write_text(exit_code)
    slurm_says(run)
    seen = observe(run)
    assert seen.state is state
    assert seen.is_final == (exit_code is not None)
    assert run.layout.state.exists() == seen.is_final


def test_the_state_is_unknown_and_not_saved_if_slurm_is_unavailable(make_run: RunMaker, programs: FakePrograms) -> None:
    runs = [make_run(), make_run()]
    overview = observe_all(runs)
    assert {seen.state for seen in overview.states.values()} == {RunState.UNKNOWN}
    assert len(overview.warnings) == 1
    assert not runs[0].layout.state.exists()
    assert programs.calls() == []


def test_a_job_whose_script_has_ended_is_not_running_while_slurm_cleans_up_its_nodes(
    make_run: RunMaker, slurm_says: Callable[..., None]
) -> None:
    run = make_run()
    run.layout.job_exit_code(run.job_id).write_text("9")
    slurm_says(run, queue="COMPLETING")
    seen = observe(run)
    assert (seen.state, seen.is_final, seen.exit_code) == (RunState.FAILED, True, 9)
    slurm_says(run, queue="PENDING")  # a node was lost, and Slurm requeued the job
    assert observe(run).state is RunState.PENDING


@pytest.mark.parametrize("is_answering", [True, False])
def test_a_run_that_waits_for_slurms_controller_says_since_when(
    make_run: RunMaker, programs: FakePrograms, slurm_says: Callable[..., None], *, is_answering: bool
) -> None:
    run, waiting = make_run(), "waiting for Slurm's controller since 2026-01-02T03:05:00Z"
    run.layout.logs.mkdir(exist_ok=True)
    log = f"2026-01-02T03:06:00Z ftkit: {waiting}: asking again in 80 s\nsrun: error: x\n"
    run.layout.job_log.write_text(log)
    slurm_says(run, queue="RUNNING")
    if not is_answering:
        programs.answer("squeue", stderr="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    assert str(observe(run)) == f"running: {waiting}"
    run.layout.job_log.write_text(f"{log}2026-01-02T03:06:00Z ftkit: Slurm's controller answers again\n")
    assert observe(run).reason != waiting


def test_a_run_in_a_read_only_folder_can_be_observed(
    make_run: RunMaker, slurm_says: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    run = make_run()
    slurm_says(run, accounting="TIMEOUT")
    monkeypatch.setattr("ftkit.launch.job_states.write_json", refuse)
    assert observe(run).state is RunState.TIMED_OUT


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"observed": 4e9}', '{"observed": 4e9, "job": {"id": "101", "state": "odd"}}']
)
def test_a_damaged_state_file_is_ignored(make_run: RunMaker, slurm_says: Callable[..., None], text: str) -> None:
    run = make_run(job_id="101")
    run.layout.state.write_text(text)
    slurm_says(run, accounting="TIMEOUT")
    assert observe(run).state is RunState.TIMED_OUT


@pytest.fixture
def trains_in() -> Callable[..., Holder]:
    """Leave the lease of a process on another machine, touched just now."""

    def leave(run: SubmittedRun, job_id: str) -> Holder:
        holder = Holder("n7", "another machine", 4711, "1", job_id, 0.0)
        run.layout.leases.mkdir()
        (run.layout.leases / "000001.json").write_text(json.dumps(asdict(holder)))
        return holder

    return leave


@pytest.mark.parametrize("scheduler", ["local", "slurm"])
def test_a_run_whose_job_is_gone_is_running_while_its_lease_is_held(
    scheduler: str, make_run: RunMaker, slurm_says: Callable[..., None], trains_in: Callable[..., Holder]
) -> None:
    run = make_run(scheduler=scheduler, job_id="99999999")
    slurm_says(run, accounting="FAILED")
    holder = trains_in(run, "55")
    seen = observe(run)
    assert (seen.state, seen.is_final) == (RunState.RUNNING, False)
    assert str(holder) in seen.reason
    with pytest.raises(SubmitError, match="job 55, process 4711 on n7"):
        resume(read_plan(run.layout), os.environ)


def test_a_saved_state_is_ignored_if_the_lease_is_newer(
    make_run: RunMaker, slurm_says: Callable[..., None], trains_in: Callable[..., Holder]
) -> None:
    run = make_run()
    slurm_says(run, accounting="FAILED")
    assert observe(run).is_final
    trains_in(run, "55")
    os.utime(run.layout.leases / "000001.json", (time.time() + 5, time.time() + 5))
    assert observe(run).state is RunState.RUNNING


@pytest.mark.parametrize(("accounting", "expected"), [("CANCELLED by 0", "canceled"), ("NODE_FAIL", "running")])
def test_processes_of_an_ended_job_may_remain_only_on_a_lost_node(
    accounting: str,
    expected: str,
    make_run: RunMaker,
    slurm_says: Callable[..., None],
    trains_in: Callable[..., Holder],
) -> None:
    run = make_run()
    slurm_says(run, accounting=accounting)
    trains_in(run, run.job_id)
    assert observe(run).state == expected


def test_a_run_that_slurm_accepted_despite_an_error_is_not_submitted_twice(
    make_run: RunMaker, programs: FakePrograms, trains_in: Callable[..., Holder]
) -> None:
    run = make_run()
    run.layout.submission.unlink()
    trains_in(run, "55")
    with pytest.raises(SubmitError, match="job 55"):
        resume(read_plan(run.layout), os.environ)
    assert programs.calls() == []
