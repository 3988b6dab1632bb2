from __future__ import annotations

import os
import signal
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from ftkit.errors import NoAnswerError, PrerequisiteError, SubmitError
from ftkit.files import write_json
from ftkit.launch.job_states import observe, observe_all
from ftkit.launch.render import render_job
from ftkit.launch.scheduler import InterruptedSubmitError, UncertainSubmitError
from ftkit.launch.submission import NewJob, cancel, find_submission, resume, submit, submit_all
from ftkit.launch.sweep import make_arrays
from ftkit.planning.plan import SweepPlan, read_plan
from ftkit.runs.history import read_history
from ftkit.runs.job import Cause, RunState, read_submission
from ftkit.runs.lease import Holder
from ftkit.runs.manifest import record_start

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import FakePrograms, RunMaker

    from ftkit.planning.layout import Workspace
    from ftkit.planning.plan import RunPlan


@pytest.fixture
def slurm_plan(plan: RunPlan) -> RunPlan:
    return replace(plan, cluster=plan.cluster.model_copy(update={"scheduler": "slurm"}))


def test_a_submitted_run_has_all_its_files(slurm_plan: RunPlan, programs: FakePrograms) -> None:
    programs.answer("sbatch", "123\n")
    run = submit(NewJob(slurm_plan, "#!/bin/bash\n", {"run": "x"}, os.environ))
    layout = slurm_plan.layout
    assert run.job_id == "123"
    assert read_submission(layout) == run.submission
    assert read_plan(layout) == slurm_plan
    assert layout.script.read_text() == "#!/bin/bash\n"
    assert layout.manifest.is_file()
    assert layout.logs.is_dir()


def test_a_rejected_run_leaves_nothing_behind(
    slurm_plan: RunPlan, programs: FakePrograms, workspace: Workspace
) -> None:
    programs.answer("sbatch", stderr="sbatch: error: invalid partition specified: x\n", code=1)
    with pytest.raises(SubmitError, match="invalid partition"):
        submit(NewJob(slurm_plan, "", {}, os.environ))
    assert list(workspace.runs.iterdir()) == []


def test_without_slurm_nothing_is_left_behind(
    slurm_plan: RunPlan, programs: FakePrograms, workspace: Workspace
) -> None:
    with pytest.raises(PrerequisiteError):
        submit(NewJob(slurm_plan, "", {}, os.environ))
    assert list(workspace.runs.iterdir()) == []
    assert programs.calls() == []


def test_a_run_that_slurm_may_have_accepted_stays_and_can_be_resubmitted(
    slurm_plan: RunPlan, programs: FakePrograms
) -> None:
    programs.answer("sbatch", stderr="sbatch: error: Batch job submission failed: Socket timed out\n", code=1)
    with pytest.raises(UncertainSubmitError, match="Socket timed out") as caught:
        submit(NewJob(slurm_plan, "", {}, os.environ))
    assert f"ftkit resume {slurm_plan.id}" in caught.value.fix
    programs.answer("sbatch", "5\n")
    programs.answer("squeue")
    assert resume(slurm_plan, os.environ).submission.job_id == "5"


@pytest.fixture
def accepted(slurm_plan: RunPlan) -> str:
    """Return what squeue lists after Slurm has accepted the run's jobs as 7 and 8."""
    folder = slurm_plan.layout.root
    return f"3|/elsewhere/job.sbatch\n7|{folder}/prepare.sbatch\n8|{folder}/job.sbatch\n"


def test_a_job_that_slurm_accepted_without_an_answer_is_found(
    slurm_plan: RunPlan, programs: FakePrograms, accepted: str
) -> None:
    programs.add(
        "sbatch", 'case "$*" in *prepare*) echo 7;; *) echo "sbatch: error: Socket timed out" >&2; exit 1;; esac'
    )
    programs.answer("squeue", accepted)
    run = submit(NewJob(slurm_plan, "", {}, os.environ, preparation="#!/bin/sh\n"))
    assert (run.job_id, run.submission.preparation_job_id) == ("8", "7")
    assert "has accepted" in run.submission.messages
    assert not programs.calls("scancel")


def test_a_run_whose_job_slurm_accepted_while_it_did_not_respond_is_not_submitted_twice(
    slurm_plan: RunPlan, programs: FakePrograms, accepted: str
) -> None:
    programs.answer("sbatch", stderr="sbatch: error: Socket timed out\n", code=1)
    programs.answer("squeue", stderr="slurm_load_jobs error: Socket timed out\n", code=1)
    with pytest.raises(UncertainSubmitError):
        submit(NewJob(slurm_plan, "", {}, os.environ))
    running = f"8|RUNNING|None|1767323100|1767326700|n1|{slurm_plan.layout.root}"
    programs.add("squeue", f'case "$*" in *--user*) echo "{accepted}";; *) echo "{running}";; esac')
    with pytest.raises(SubmitError, match="is running"):
        resume(slurm_plan, os.environ)
    submission = read_submission(slurm_plan.layout)
    assert submission is not None
    assert submission.job_id == "8"


def test_an_interrupted_submission_cancels_the_preparation_and_says_what_to_do(
    slurm_plan: RunPlan, programs: FakePrograms
) -> None:
    # While ftkit waits for it: a signal that arrives before that would find no program to end.
    interrupt = (
        "until read _ _ state _ </proc/$PPID/stat; [ $state = S ]; do :; done; kill -INT $PPID; exec /bin/sleep 5"
    )
    programs.add("sbatch", f'case "$*" in *prepare*) echo 7;; *) echo $$ >pid; {interrupt};; esac')
    programs.answer("scancel")
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # torchrun leaves its own in a process
    try:
        with pytest.raises(InterruptedSubmitError) as caught:
            submit(NewJob(slurm_plan, "#!/bin/bash\n", {}, os.environ, preparation="#!/bin/sh\n"))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert caught.value.exit_code == 130
    assert f"ftkit resume {slurm_plan.id}" in caught.value.fix
    assert programs.calls("scancel") == ["scancel 7"]
    assert slurm_plan.layout.plan.is_file()
    sbatch = (slurm_plan.layout.root / "pid").read_text().strip()
    assert not Path(f"/proc/{sbatch}").exists()  # not a zombie either


def test_a_training_job_waits_for_the_job_that_prepares_it_and_both_are_canceled(
    slurm_plan: RunPlan, programs: FakePrograms, squeue_line: Callable[..., str]
) -> None:
    programs.add("sbatch", 'case "$*" in *prepare*) echo 7;; *) echo 8;; esac')
    run = submit(NewJob(slurm_plan, "#!/bin/bash\n", {}, os.environ, preparation="#!/bin/sh\n"))
    assert slurm_plan.layout.preparation_script.read_text() == "#!/bin/sh\n"
    assert programs.calls("sbatch") == [
        "sbatch --parsable prepare.sbatch",
        "sbatch --parsable --dependency=afterok:7 --kill-on-invalid-dep=yes job.sbatch",
    ]
    assert (run.job_id, run.submission.preparation_job_id) == ("8", "7")
    programs.answer("squeue", squeue_line(run, "PENDING", reason="Dependency"))
    assert "that prepares" in observe(run).reason
    programs.answer("scancel")
    cancel([run])
    assert programs.calls("scancel") == ["scancel 8 7"]


def test_a_preparation_job_is_canceled_if_the_training_job_is_rejected(
    slurm_plan: RunPlan, programs: FakePrograms, workspace: Workspace
) -> None:
    programs.add("sbatch", 'case "$*" in *prepare*) echo 7;; *) echo "invalid partition" >&2; exit 1;; esac')
    programs.answer("scancel")
    with pytest.raises(SubmitError, match="invalid partition"):
        submit(NewJob(slurm_plan, "", {}, os.environ, preparation=""))
    assert programs.calls("scancel") == ["scancel 7"]
    assert list(workspace.runs.iterdir()) == []


@pytest.mark.parametrize("left", ["8", None])
def test_a_run_whose_preparation_failed_has_failed_and_not_been_canceled(
    slurm_plan: RunPlan, programs: FakePrograms, sacct_line: Callable[..., str], left: str | None
) -> None:
    programs.add("sbatch", 'case "$*" in *prepare*) echo 7;; *) echo 8;; esac')
    run = submit(NewJob(slurm_plan, "", {}, os.environ, preparation=""))
    if left:
        run.layout.job_exit_code("7").write_text(left)
    programs.answer("squeue")
    programs.answer("sacct", sacct_line(run, "CANCELLED"))
    seen = observe(run)
    assert (seen.state, seen.exit_code) == (RunState.FAILED, int(left) if left else None)
    assert seen.reason == "its data and weights could not be prepared (job 7)"


def test_a_read_only_workspace_is_reported(slurm_plan: RunPlan, workspace: Workspace) -> None:
    workspace.root.write_text("a file, not a folder")
    with pytest.raises(PrerequisiteError, match="can't create"):
        submit(NewJob(slurm_plan, "", {}, os.environ))


def test_a_resumed_run_clears_its_end_state_and_keeps_its_job_ids(
    make_run: RunMaker, programs: FakePrograms, sacct_line: Callable[..., str], squeue_line: Callable[..., str]
) -> None:
    run = make_run(job_id="1")
    layout = run.layout
    left = (layout.canceled, layout.stop_request, layout.job_stop_request("1"), layout.job_exit_code("1"))
    for path in left:
        path.write_text("1")
    programs.answer("squeue")
    programs.answer("sacct", sacct_line(run, "FAILED"))
    programs.answer("sbatch", "2\n")
    again = resume(read_plan(layout), os.environ)
    assert (again.submission.job_id, again.submission.earlier_job_ids) == ("2", ("1",))
    assert not any(path.exists() for path in (*left, layout.state))
    programs.answer("squeue", squeue_line(again, "RUNNING"))
    with pytest.raises(SubmitError, match="is running"):
        resume(read_plan(layout), os.environ)


@pytest.mark.parametrize(
    ("accounting", "cause"),
    [
        ("CANCELLED by 1000", Cause.CANCELED),
        ("TIMEOUT", Cause.TIME_LIMIT),
        ("FAILED", Cause.PREEMPTED),
        ("FAILED", Cause.DISK_FULL),
    ],
)
def test_the_next_start_of_a_resumed_run_records_how_its_last_job_ended(
    accounting: str,
    cause: Cause,
    make_run: RunMaker,
    programs: FakePrograms,
    sacct_line: Callable[..., str],
    tmp_path: Path,
) -> None:
    run = make_run(job_id="1")
    layout = run.layout
    layout.manifest.write_text("{}")
    record_start(layout.manifest, tmp_path)
    layout.end_reason.write_text("preempted\n")  # by the job script, which then could not requeue itself
    if cause is Cause.DISK_FULL:
        layout.disk_full.touch()
    programs.answer("squeue")
    programs.answer("sacct", sacct_line(run, accounting))
    programs.answer("sbatch", "2\n")
    resume(read_plan(layout), os.environ)
    record_start(layout.manifest, tmp_path)
    record_start(layout.manifest, tmp_path)
    assert [each.reason and each.reason.cause for each in read_history(layout).restarts] == [cause, Cause.UNKNOWN]


def test_a_completed_run_has_nothing_to_resume(make_run: RunMaker, records: Any) -> None:
    run = make_run()
    records.write(run, records.end())
    run.layout.job_exit_code(run.job_id).write_text("0")
    plan = read_plan(run.layout)
    with pytest.raises(SubmitError, match="has completed") as caught:
        resume(plan, os.environ)
    assert "training.max_steps=N" in caught.value.fix
    training = plan.recipe.training.model_copy(update={"max_steps": None, "num_epochs": 2})
    with pytest.raises(SubmitError, match="has completed") as caught:
        resume(replace(plan, recipe=plan.recipe.model_copy(update={"training": training})), os.environ)
    assert "training.num_epochs=N" in caught.value.fix


def test_a_run_on_another_machine_is_resumed_here_only_if_nothing_trains_it_there(
    make_run: RunMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(scheduler="local")
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    monkeypatch.setattr("ftkit.launch.submission.current_holder", lambda _: "a process")
    with pytest.raises(SubmitError, match=run.submission.host):
        resume(read_plan(run.layout), os.environ)
    monkeypatch.setattr("ftkit.launch.submission.current_holder", lambda _: None)
    run.layout.job_log.touch()  # it prepares its data
    with pytest.raises(SubmitError, match=run.submission.host):
        resume(read_plan(run.layout), os.environ)
    os.utime(run.layout.job_log, (0, 0))
    assert resume(read_plan(run.layout), os.environ).submission.host == "elsewhere"


def test_a_run_of_another_machine_is_not_canceled_by_ending_the_process_with_its_id_here(
    make_run: RunMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(scheduler="local", job_id=str(os.getpid()))
    monkeypatch.setattr("os.kill", Mock())
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    with pytest.raises(SubmitError, match=run.submission.host):
        cancel([run])
    os.kill.assert_not_called()  # type: ignore[attr-defined]
    assert not run.layout.canceled.exists()


def test_a_run_is_not_submitted_again_while_slurm_does_not_answer(make_run: RunMaker, programs: FakePrograms) -> None:
    run = make_run()
    programs.answer("squeue", stderr="slurm_load_jobs error: Socket timed out on send/recv operation\n", code=1)
    with pytest.raises(NoAnswerError):
        resume(read_plan(run.layout), os.environ)
    assert programs.calls("sbatch") == []


def test_a_resumed_job_that_slurm_accepted_without_an_answer_is_found_later(
    make_run: RunMaker, programs: FakePrograms, sacct_line: Callable[..., str]
) -> None:
    run = make_run(job_id="101")
    programs.answer("sacct", sacct_line(run, "FAILED"))
    programs.answer("sbatch", stderr="sbatch: error: Batch job submission failed: Socket timed out\n", code=1)
    programs.answer("squeue")
    with pytest.raises(UncertainSubmitError):
        resume(read_plan(run.layout), os.environ)
    programs.answer("squeue", f"202|{run.layout.script}\n")
    found = find_submission(run.layout)
    assert found
    assert (found.job_id, found.earlier_job_ids) == ("202", ("101",))
    assert found.submitted > run.submission.submitted + 86_400  # when it was resumed: the end of job 101 is not its end
    assert read_submission(run.layout) == found


def test_a_run_that_may_have_another_job_is_known_on_a_machine_without_slurm(
    make_run: RunMaker, programs: FakePrograms
) -> None:
    run = make_run(job_id="101")
    superseded = replace(run.submission, superseded=2e9)
    write_json(run.layout.submission, superseded)
    assert find_submission(run.layout) == superseded
    programs.answer("squeue", f"101|{run.layout.script}\n")  # it was requeued: no other job
    assert find_submission(run.layout) == superseded


def test_two_commands_that_resume_a_run_submit_one_job(
    make_run: RunMaker, programs: FakePrograms, squeue_line: Callable[..., str], sacct_line: Callable[..., str]
) -> None:
    run = make_run(job_id="101")
    programs.answer("sacct", sacct_line(run, "FAILED"))
    programs.add("sbatch", f"sleep 0.2; echo 5 >{run.layout.root}/submitted; echo 555")
    pending = squeue_line(run, "PENDING").replace("101|", "555|")
    programs.add("squeue", f"test -e {run.layout.root}/submitted && echo '{pending.strip()}'; exit 0")
    errors = []

    def submit_again() -> None:
        try:
            resume(read_plan(run.layout), os.environ)
        except SubmitError as error:
            errors.append(error)

    threads = [threading.Thread(target=submit_again) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([call for call in programs.calls("sbatch") if run.layout.script.name in call]) == 1
    assert [error.name for error in errors] == ["run-not-ended"]


def test_a_refused_resume_keeps_how_the_run_ended(
    make_run: RunMaker, programs: FakePrograms, sacct_line: Callable[..., str]
) -> None:
    run = make_run()
    run.layout.canceled.touch()
    programs.answer("squeue")
    programs.answer("sacct", sacct_line(run, "CANCELLED by 0"))
    assert observe(run).state is RunState.CANCELED
    programs.answer("sbatch", stderr="sbatch: error: Job violates accounting/QOS policy\n", code=1)
    with pytest.raises(SubmitError, match="QOS"):
        resume(read_plan(run.layout), os.environ)
    programs.answer("sacct")
    assert observe(run).state is RunState.CANCELED
    assert run.layout.state.is_file()


@pytest.mark.parametrize(("preparation", "state"), [("RUNNING", RunState.CANCELED), ("NODE_FAIL", RunState.FAILED)])
def test_a_job_canceled_by_hand_while_it_waited_has_no_failed_preparation(
    make_run: RunMaker, programs: FakePrograms, squeue_line: Callable[..., str], preparation: str, state: RunState
) -> None:
    run = make_run(job_id="201")
    run = replace(run, submission=replace(run.submission, preparation_job_id="200"))
    lines = squeue_line(run, "CANCELLED") + squeue_line(run, preparation).replace("201|", "200|")
    programs.answer("squeue", lines)
    assert observe(run).state is state


def test_a_full_disk_does_not_keep_a_job_from_being_canceled(
    make_run: RunMaker, programs: FakePrograms, squeue_line: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    programs.answer("squeue", squeue_line(run, "RUNNING"))
    programs.answer("scancel")
    monkeypatch.setattr(Path, "touch", Mock(side_effect=OSError(28, "No space left on device")))
    assert cancel([run]) == {}
    assert programs.calls("scancel") == [f"scancel {run.job_id}"]


def test_cancellation_is_recorded_before_slurm_ends_the_job(
    make_run: RunMaker, programs: FakePrograms, squeue_line: Callable[..., str]
) -> None:
    run = make_run(job_id="77")
    programs.answer("squeue", squeue_line(run, "RUNNING"))
    programs.add("scancel", f'test -e "{run.layout.canceled}"')
    assert cancel([run]) == {}
    assert programs.calls("scancel") == ["scancel 77"]


def test_canceling_a_run_also_ends_a_job_that_was_submitted_by_hand(
    make_run: RunMaker, programs: FakePrograms, sacct_line: Callable[..., str]
) -> None:
    run = make_run(job_id="77")
    run.layout.leases.mkdir()
    write_json(run.layout.leases / "000001.json", asdict(Holder("n7", "another machine", 4711, "1", "99", 0.0)))
    programs.answer("squeue")
    programs.answer("sacct", sacct_line(run, "FAILED"))
    programs.answer("scancel")
    assert cancel([run]) == {}
    assert programs.calls("scancel") == ["scancel 77 99"]


def test_a_job_that_could_not_be_canceled_is_not_marked_canceled(
    make_run: RunMaker, programs: FakePrograms, squeue_line: Callable[..., str]
) -> None:
    run = make_run()
    programs.answer("squeue", squeue_line(run, "RUNNING"))
    programs.answer("scancel", stderr="scancel: error: permission denied", code=1)
    with pytest.raises(SubmitError):
        cancel([run])
    assert not run.layout.canceled.exists()
    assert observe(run).state is RunState.RUNNING


@pytest.mark.parametrize(
    ("words", "accounting", "state"),
    [
        ("*** JOB 1 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO PREEMPTION ***", "", RunState.PREEMPTED),
        ("*** JOB 1 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***", "", RunState.TIMED_OUT),
        ("*** JOB 1 ON n1 CANCELLED AT 2026-01-02T03:04:05 ***", "", RunState.CANCELED),
        ("StepId=1.0 exceeded memory limit (9 > 8), being killed", "", RunState.OUT_OF_MEMORY),
        ("StepId=1.0 exceeded memory limit (9 > 8), being killed", "FAILED", RunState.OUT_OF_MEMORY),
        ("*** JOB 2 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO PREEMPTION ***", "", RunState.COMPLETED),
        ("*** JOB 1 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO JOB REQUEUE ***", "", RunState.COMPLETED),
    ],
)
def test_the_job_log_tells_the_state_of_a_job_that_slurm_has_forgotten(
    words: str,
    accounting: str,
    state: RunState,
    make_run: RunMaker,
    programs: FakePrograms,
    sacct_line: Callable[..., str],
) -> None:
    run = make_run(job_id="1")
    run.layout.logs.mkdir(exist_ok=True)
    run.layout.job_log.write_text(f"2026-01-02T03:04:00Z ftkit: training\nslurmstepd-n1: error: {words}\n")
    is_killed = state is RunState.OUT_OF_MEMORY
    run.layout.job_exit_code(run.job_id).write_text("137" if is_killed else "0")  # the trainer stopped in time
    programs.answer("squeue")
    programs.answer("sacct", sacct_line(run, accounting, "137:0") if accounting else "")
    assert observe(run).state is state


def test_slurms_words_about_a_task_of_an_array_have_another_number_than_its_id(
    make_run: RunMaker, programs: FakePrograms
) -> None:
    run = make_run(job_id="8_1")
    words = "*** JOB 11 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO PREEMPTION ***"
    run.layout.job_log.write_text(f"2026-01-02T03:04:00Z ftkit: training\nslurmstepd-n1: error: {words}\n")
    programs.answer("squeue")
    programs.answer("sacct")
    assert observe(run).state is RunState.PREEMPTED


# --- The runs of a sweep, as a job array ---------------------------------------------------------


@pytest.fixture
def sweep(slurm_plan: RunPlan) -> list[NewJob[RunPlan]]:
    """Return three runs of a sweep, of which the second prepares its data."""
    plans = [replace(slurm_plan, id=f"demo-{number}-20260102T030405Z-ab12{number}", name=f"demo-{number}",
                     sweep=SweepPlan("demo-20260102T030405Z", "demo", {"training.seed": str(number)}))
             for number in (1, 2, 3)]  # fmt: skip
    return [
        NewJob(plan, render_job(plan), {}, os.environ, preparation="x" if plan.number == "2" else None)
        for plan in plans
    ]


PREPARED_AS_7 = 'case "$*" in *prepare*) echo 7;; *) echo 8;; esac'


def test_a_sweep_is_one_job_array_with_a_throttle_in_which_each_run_has_its_own_task(
    sweep: list[NewJob[RunPlan]], programs: FakePrograms, squeue_line: Callable[..., str]
) -> None:
    programs.add("sbatch", PREPARED_AS_7)
    ((jobs, tasks),) = make_arrays(sweep, 2, None)
    runs = submit_all(jobs, tasks)
    assert programs.calls("sbatch") == [
        "sbatch --parsable --array=1-3%2 prepare-array.sbatch",
        "sbatch --parsable --array=1-3%2 --dependency=aftercorr:7 --kill-on-invalid-dep=yes array.sbatch",
    ]
    for number, (run, job) in enumerate(zip(runs, sweep, strict=True), start=1):
        assert read_submission(job.plan.layout) == run.submission
        assert (run.job_id, run.submission.preparation_job_id) == (f"8_{number}", f"7_{number}")
        assert run.layout.script.read_text() == job.script
        assert "SBATCH --job-name=demo-" in run.layout.preparation_script.read_text()
    assert "SBATCH --job-name=demo\n" in runs[0].layout.array_script.read_text()
    assert not runs[1].layout.array_script.exists()

    squeue = "".join(squeue_line(run, "PENDING", reason="Dependency") for run in runs)
    programs.answer("squeue", squeue.replace(str(runs[2].layout.root), str(runs[0].layout.root)))
    programs.answer("scancel")
    assert {seen.state for seen in observe_all(runs).states.values()} == {RunState.PENDING}
    assert [call for call in programs.calls("squeue") if "--jobs=8" in call] == programs.calls("squeue")
    assert len(programs.calls("squeue")) == 1
    cancel([runs[1]])
    assert programs.calls("scancel") == ["scancel 8_[2] 7_[2]"]


def test_a_sweep_is_canceled_with_one_question_and_one_request_for_each_array(
    sweep: list[NewJob[RunPlan]], programs: FakePrograms, squeue_line: Callable[..., str]
) -> None:
    programs.add("sbatch", 'case "$*" in *prepare*) echo 7;; *) echo 8;; esac')
    runs = submit_all(*make_arrays(sweep, 2, None)[0])
    states = zip(runs, ("RUNNING", "COMPLETED", "PENDING"), strict=True)
    programs.answer("squeue", "".join(squeue_line(run, state) for run, state in states))
    programs.answer("scancel")
    ended = cancel(runs)
    assert {run: seen.state for run, seen in ended.items()} == {runs[1].id: RunState.COMPLETED}
    assert [run.layout.canceled.exists() for run in runs] == [True, False, True]
    assert len(programs.calls("squeue")) == 1
    assert programs.calls("scancel") == ["scancel 8_[1,3] 7_[1,3]"]


def test_runs_with_other_resources_are_another_array_and_wait_for_the_first_if_there_is_a_limit(
    sweep: list[NewJob[RunPlan]], programs: FakePrograms, squeue_line: Callable[..., str]
) -> None:
    programs.add("sbatch", 'case "$*" in *prepare*) echo 7;; *array=2*) echo 9;; *) echo 8;; esac')
    sweep[1] = replace(sweep[1], script=sweep[1].script.replace("#SBATCH --nodes=1", "#SBATCH --nodes=2"))
    (first, tasks), (second, other_tasks) = make_arrays(sweep, 1, None)
    runs = submit_all(first, tasks)
    (waiting,) = submit_all(second, other_tasks, after=runs[-1])
    assert programs.calls("sbatch")[0] == "sbatch --parsable --array=1,3%1 array.sbatch"
    assert programs.calls("sbatch")[-1] == (
        "sbatch --parsable --array=2%1 --dependency=afterany:8,aftercorr:7 --kill-on-invalid-dep=yes array.sbatch"
    )
    programs.answer("squeue", squeue_line(waiting, "PENDING", reason="Dependency"))
    assert "job 8 of its sweep" in observe(waiting).reason


def test_runs_on_this_machine_are_no_array(plan: RunPlan) -> None:
    jobs = [NewJob(replace(plan, id=f"{plan.id}{number}"), "", {}, os.environ) for number in (1, 2)]
    assert make_arrays(jobs, 2, None) == [([jobs[0]], ""), ([jobs[1]], "")]


def test_a_sweep_that_slurm_rejects_leaves_nothing_behind(
    sweep: list[NewJob[RunPlan]], programs: FakePrograms, workspace: Workspace
) -> None:
    programs.add(
        "sbatch", 'case "$*" in *prepare*) echo 7;; *) echo "Invalid job array specification" >&2; exit 1; esac'
    )
    programs.answer("scancel")
    ((jobs, tasks),) = make_arrays(sweep, None, None)
    with pytest.raises(SubmitError, match="Invalid job array") as caught:
        submit_all(jobs, tasks)
    assert "MaxArraySize" in caught.value.fix
    assert programs.calls("scancel") == ["scancel 7"]
    assert list(workspace.runs.iterdir()) == []


def test_each_run_of_an_array_that_slurm_accepted_without_an_answer_is_found(
    sweep: list[NewJob[RunPlan]], programs: FakePrograms
) -> None:
    sweep = [replace(job, preparation=None) for job in sweep]
    ((jobs, tasks),) = make_arrays(sweep, None, None)
    array = jobs[0].plan.layout.array_script
    programs.answer("sbatch", stderr="sbatch: error: Socket timed out\n", code=1)
    programs.answer("squeue", "".join(f"8_{number}|{array}\n" for number in (1, 2, 3)))
    assert [run.job_id for run in submit_all(jobs, tasks)] == ["8_1", "8_2", "8_3"]
    for number, job in enumerate(sweep, start=1):
        job.plan.layout.submission.unlink()
        found = find_submission(job.plan.layout)
        assert (found.job_id if found else None) == f"8_{number}"
