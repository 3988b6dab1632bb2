from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from ftkit import process
from ftkit.errors import NoAnswerError, PrerequisiteError, SubmitError
from ftkit.launch.scheduler import (
    SlurmScheduler,
    UncertainSubmitError,
    explain_refusal,
    warn_of_variables,
)
from ftkit.launch.slurm import find_job, read_sacct, read_squeue
from ftkit.planning.layout import RunLayout
from ftkit.runs.job import JobId, RunState, Submission, SubmittedRun, own_job_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import FakePrograms, RunMaker


@pytest.fixture
def slurm() -> SlurmScheduler:
    return SlurmScheduler()


@pytest.mark.parametrize("printed", ["123\n", "123;east\n", "Welcome to the cluster\n123\n"])
def test_the_job_id_is_parsed_from_sbatchs_output(
    slurm: SlurmScheduler, programs: FakePrograms, make_run: RunMaker, printed: str
) -> None:
    programs.answer("sbatch", printed, stderr="sbatch: lua: Account set to physics\n")
    submission = slurm.submit(make_run().layout, os.environ)
    assert (submission.scheduler, submission.job_id) == ("slurm", "123")
    assert submission.messages == "Account set to physics"


def test_the_script_is_submitted_from_its_run_folder(
    slurm: SlurmScheduler, programs: FakePrograms, make_run: RunMaker
) -> None:
    programs.add("sbatch", 'pwd >"$0.cwd"; echo 1')
    run = make_run()
    slurm.submit(run.layout, os.environ)
    assert programs.calls("sbatch") == ["sbatch --parsable job.sbatch"]
    assert (programs.folder / "sbatch.cwd").read_text().strip() == str(run.layout.root)


def test_variables_of_an_enclosing_job_do_not_reach_the_job(
    slurm: SlurmScheduler, programs: FakePrograms, make_run: RunMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "1000")
    monkeypatch.setenv("SLURM_CONF", "/etc/other.conf")
    monkeypatch.setenv("SBATCH_ACCOUNT", "physics")
    programs.add("sbatch", 'env >"$0.env"; echo 1')
    slurm.submit(make_run().layout, os.environ)
    environment = (programs.folder / "sbatch.env").read_text().splitlines()
    assert not [line for line in environment if line.startswith("SLURM_MEM_PER_CPU")]
    assert "SLURM_CONF=/etc/other.conf" in environment
    assert "SBATCH_ACCOUNT=physics" in environment
    warnings = warn_of_variables({"SBATCH_ACCOUNT": "physics", "HOME": "/"})
    assert warnings == ["SBATCH_ACCOUNT=physics in your environment overrides the job script"]


@pytest.mark.parametrize("variable", ["SBATCH_WAIT", "SBATCH_ARRAY_INX", "SBATCH_CLUSTERS", "SBATCH_NO_REQUEUE"])
def test_a_variable_that_would_change_how_a_job_is_followed_is_ignored_with_a_warning(
    slurm: SlurmScheduler, programs: FakePrograms, make_run: RunMaker, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    programs.add("sbatch", 'env >"$0.env"; echo 1')
    slurm.submit(make_run().layout, os.environ)
    environment = (programs.folder / "sbatch.env").read_text().splitlines()
    assert f"{variable}=1" not in environment
    assert [one for one in warn_of_variables(os.environ) if one.startswith(f"{variable}=1") and "is ignored" in one]


@pytest.mark.parametrize(("value", "loses"), [("NONE", True), ("MODE", True), ("ALL,MODE=1", False)])
def test_a_job_that_gets_no_secrets_is_announced(value: str, loses: bool) -> None:
    (warning,) = warn_of_variables({"SBATCH_EXPORT": value})
    assert ("HF_TOKEN" in warning) is loses


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("Batch job submission failed: Invalid job array specification", "MaxArraySize"),
        ("invalid partition specified: nope", "partition:"),
        ("Batch job submission failed: Required partition not available (inactive or drain)", "sinfo -s"),
        ("Batch job submission failed: Invalid account or account/partition combination specified", "account:"),
        ("Batch job submission failed: Invalid qos specification", "qos:"),
        ("Batch job submission failed: Requested node configuration is not available", "gpus_per_node:"),
        ("Batch job submission failed: Invalid generic resource (gres) specification", "gpu_request:"),
        ("Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)", "time_limit"),
        ("Batch job submission failed: Node count specification invalid", "--nodes"),
        ("Batch job submission failed: Requested reservation is invalid", "reservation:"),
        ("Batch job submission failed: User's group not permitted to use this partition", "administrators"),
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "wait until other jobs end",
        ),
        ("unrecognized option '--gpus-per-node=8'", "--dry-run"),
        ("something that nobody has seen yet", "--dry-run"),
    ],
)
def test_a_rejection_by_sbatch_is_reported_with_a_fix(message: str, hint: str) -> None:
    error = explain_refusal(f"sbatch: error: {message}\n")
    assert message in error.what
    assert hint in error.fix
    assert not isinstance(error, UncertainSubmitError)


@pytest.mark.parametrize(
    "message",
    [
        "Unable to contact slurm controller (connect failure)",
        "Socket timed out",
        "Batch job submission failed: Zero Bytes were transmitted or received",
        "Batch job submission failed: Transport endpoint is not connected",
        "Batch job submission failed: Insane message length",
        "Batch job submission failed: Rate limit exceeded, please retry later",
    ],
)
def test_an_uncertain_submission_is_distinguished_from_a_rejection(message: str) -> None:
    assert isinstance(explain_refusal(f"sbatch: error: {message}"), UncertainSubmitError)


def test_success_without_a_job_id_is_uncertain(
    slurm: SlurmScheduler, programs: FakePrograms, make_run: RunMaker
) -> None:
    programs.answer("sbatch", "queued somewhere\n")
    with pytest.raises(UncertainSubmitError, match="queued somewhere"):
        slurm.submit(make_run().layout, os.environ)


def test_a_machine_without_slurm_is_reported_as_not_a_login_node(
    slurm: SlurmScheduler, programs: FakePrograms, make_run: RunMaker
) -> None:
    with pytest.raises(PrerequisiteError, match="sbatch") as caught:
        slurm.submit(make_run().layout, os.environ)
    assert "login node" in caught.value.meaning
    assert not programs.calls()


def test_many_runs_are_queried_in_one_call(
    slurm: SlurmScheduler, programs: FakePrograms, make_run: RunMaker, squeue_line: Callable[..., str]
) -> None:
    runs = [make_run() for _ in range(5)]
    programs.answer("squeue", "".join(squeue_line(run, "RUNNING") for run in runs))
    states = slurm.observe(runs)
    assert {seen.state for seen in states.values()} == {RunState.RUNNING}
    assert len(states) == 5
    assert len(programs.calls()) == 1


def test_jobs_unknown_to_squeue_are_looked_up_with_sacct(
    slurm: SlurmScheduler,
    programs: FakePrograms,
    make_run: RunMaker,
    squeue_line: Callable[..., str],
    sacct_line: Callable[..., str],
) -> None:
    waiting, failed, lost = make_run(), make_run(), make_run()
    programs.answer("squeue", squeue_line(waiting, "PENDING", "Priority"))
    programs.answer("sacct", sacct_line(failed, "FAILED", "9:0"))
    states = slurm.observe([waiting, failed, lost])
    assert states[waiting.id].state is RunState.PENDING
    assert states[waiting.id].reason == "Priority: other jobs are ahead of it"
    assert (states[failed.id].state, states[failed.id].exit_code) == (RunState.FAILED, 9)
    assert states[failed.id].started == 1767323100
    assert lost.id not in states
    assert waiting.submission.job_id not in programs.calls("sacct")[0]


def test_a_requeued_job_has_not_ended_whatever_sacct_reports(
    slurm: SlurmScheduler,
    programs: FakePrograms,
    make_run: RunMaker,
    squeue_line: Callable[..., str],
    sacct_line: Callable[..., str],
) -> None:
    run = make_run()
    programs.answer("squeue", squeue_line(run, "PENDING", "BeginTime"))
    programs.answer("sacct", sacct_line(run, "NODE_FAIL"))
    seen = slurm.observe([run])[run.id]
    assert (seen.state, seen.is_final) == (RunState.PENDING, False)
    assert "two minutes" in seen.reason


def test_a_cluster_without_accounting_is_not_an_error(
    slurm: SlurmScheduler, programs: FakePrograms, make_run: RunMaker
) -> None:
    programs.answer("squeue", stderr="slurm_load_jobs error: Invalid job id specified\n", code=1)
    assert slurm.observe([make_run()]) == {}
    programs.answer("sacct", stderr="Slurm accounting storage is disabled\n", code=1)
    assert slurm.observe([make_run()]) == {}


def test_a_controller_that_does_not_answer_is_an_error(
    slurm: SlurmScheduler, programs: FakePrograms, make_run: RunMaker
) -> None:
    programs.answer("squeue", stderr="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    with pytest.raises(SubmitError, match="Unable to contact"):
        slurm.observe([make_run()])


@pytest.mark.parametrize("code", [0, 1])
def test_output_that_lists_no_jobs_tells_nothing_about_them(
    slurm: SlurmScheduler, programs: FakePrograms, make_run: RunMaker, code: int
) -> None:
    run = make_run()
    programs.answer("squeue", "<html>Service Unavailable</html>\n", code=code)
    for ask in (lambda: slurm.observe([run]), lambda: find_job(run.layout, os.environ)):
        with pytest.raises(NoAnswerError, match="Service Unavailable"):
            ask()


def test_a_job_that_another_cluster_of_a_federation_has_started_is_not_over(
    slurm: SlurmScheduler, programs: FakePrograms, make_run: RunMaker, squeue_line: Callable[..., str]
) -> None:
    run = make_run(job_id="67108901")
    programs.answer("squeue", squeue_line(run, "REVOKED"))
    seen = slurm.observe([run])[run.id]
    assert (seen.state, seen.is_final, "federation" in seen.reason) == (RunState.RUNNING, False, True)


def test_a_job_with_the_same_id_in_another_folder_is_another_run(
    make_run: RunMaker, squeue_line: Callable[..., str]
) -> None:
    here, elsewhere = make_run(job_id="7"), make_run(job_id="7")
    assert read_squeue(squeue_line(elsewhere, "RUNNING"), [here]) == {}


NUMBERS = st.integers(1, 10**17)
JOB_IDS = NUMBERS.map(str) | st.tuples(NUMBERS, st.integers(0, 4_000_000)).map("{0[0]}_{0[1]}".format)


@given(JOB_IDS, NUMBERS)
def test_a_jobs_id_is_the_same_in_its_processes_in_its_run_and_in_slurms_output(job_id: str, own_number: int) -> None:
    array, _, task = job_id.partition("_")
    environment = {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": task} if task else {}
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {"SLURM_JOB_ID": str(own_number) if task else job_id, **environment}.items():
            patch.setenv(key, value)
        assert own_job_id() == job_id
    assert TypeAdapter(JobId).validate_python(job_id) == job_id
    layout = RunLayout(Path(f"/w/runs/demo-{task}-20260102T030405Z-ab12{task}"))
    submission = Submission("slurm", array, 0.0, "login")
    run = SubmittedRun(layout, submission.of_task(task) if task else submission)
    assert run.job_id == job_id
    folder = str(layout.root) if not task else "/w/runs/demo-1-20260102T030405Z-ab121"
    (seen,) = read_squeue(f"{job_id}|RUNNING|None|1|2|n1|{folder}\n", [run]).values()
    assert (seen.id, seen.state) == (job_id, RunState.RUNNING)
    other = folder.replace("0405Z", "0406Z")
    assert read_squeue(f"{job_id}|RUNNING|None|1|2|n1|{other}\n", [run]) == {}


@given(st.text("0123456789_[]%-,. ", max_size=8))
def test_what_a_program_could_take_for_an_option_or_for_several_jobs_is_no_job_id(text: str) -> None:
    try:
        TypeAdapter(JobId).validate_python(text)
    except ValidationError:
        return
    number, _, task = text.partition("_")
    assert number.isdigit()
    assert task.isdigit() or text == number


def test_a_task_that_was_canceled_before_it_started_is_missing_among_the_tasks_of_its_array(
    slurm: SlurmScheduler, programs: FakePrograms, make_run: RunMaker, squeue_line: Callable[..., str]
) -> None:
    runs = [make_run("demo-1", job_id="7_1"), make_run("demo-2", job_id="7_2"), make_run("demo-3", job_id="7_3")]
    runs[2].layout.job_log.touch()  # it has started: its files tell how it ended
    sibling = runs[1].id.replace("demo-2", "demo-4").removesuffix("2") + "4"
    lines = [squeue_line(runs[0], "RUNNING").replace(runs[0].id, folder) for folder in (runs[0].id, sibling)]
    other = make_run("odd-3", job_id="8_3")  # of a cluster that was reinstalled: array 8 is another's now
    programs.answer("squeue", "".join([*lines, lines[0].replace("7_1|", "8_1|")]))
    programs.answer("sacct")
    states = slurm.observe([*runs, other, make_run(job_id="9")])
    assert {run_id: seen.state for run_id, seen in states.items()} == {
        runs[0].id: RunState.RUNNING, runs[1].id: RunState.CANCELED
    }  # fmt: skip


def test_the_task_of_another_run_of_a_sweep_is_not_this_runs_job(programs: FakePrograms, make_run: RunMaker) -> None:
    run = make_run("lr-3", suffix="abc3")
    other = str(run.layout.array_script).replace("lr-3-", "lr-30-").replace("abc3", "abc30")
    programs.answer("squeue", f"77_35|{other}\n77_0|{other}\n")
    assert find_job(run.layout, os.environ) is None
    programs.answer("squeue", f"77_35|{other}\n77_3|{other}\n")
    assert find_job(run.layout, os.environ) == "77_3"


def test_a_newer_run_with_the_job_id_of_an_older_one_has_its_own_state(
    slurm: SlurmScheduler, programs: FakePrograms, make_run: RunMaker, squeue_line: Callable[..., str]
) -> None:
    runs = [make_run("new", job_id="7"), make_run("old", job_id="7")]
    programs.answer("squeue", squeue_line(runs[0], "RUNNING"))
    programs.answer("sacct")
    assert slurm.observe(runs)[runs[0].id].state is RunState.RUNNING


def test_all_tasks_of_a_job_array_are_queried_by_one_id(
    slurm: SlurmScheduler, programs: FakePrograms, make_run: RunMaker
) -> None:
    runs = [make_run(job_id=f"{array}_{task}") for array in (7, 8, 9, 10, 11) for task in range(1, 41)]
    programs.answer("squeue")
    programs.answer("sacct")
    slurm.observe(runs)
    for program in ("squeue", "sacct"):
        (call,) = programs.calls(program)
        assert call.endswith("--jobs=7,8,9,10,11")


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("COMPLETED", RunState.COMPLETED),
        ("CANCELLED by 1000", RunState.CANCELED),
        ("TIMEOUT", RunState.TIMED_OUT),
        ("OUT_OF_MEMORY", RunState.OUT_OF_MEMORY),
        ("OUT_OF_ME+", None),
        ("NODE_FAIL", RunState.NODE_FAILURE),
        ("BOOT_FAIL", RunState.NODE_FAILURE),
        ("PREEMPTED", RunState.PREEMPTED),
        ("DEADLINE", RunState.TIMED_OUT),
        ("RUNNING", None),
        ("SOMETHING_NEW", None),
        ("", None),
    ],
)
def test_sacct_states_are_mapped(
    make_run: RunMaker, sacct_line: Callable[..., str], word: str, state: RunState | None
) -> None:
    run = make_run()
    seen = read_sacct(sacct_line(run, word), [run]).get(run.id)
    assert (seen.state if seen else None) == state
    assert seen is None or seen.is_final


@pytest.mark.parametrize(
    ("word", "state", "is_final"),
    [
        ("CONFIGURING", RunState.PENDING, False),
        ("COMPLETING", RunState.RUNNING, False),
        ("REQUEUE_HOLD", RunState.PENDING, False),
        ("SUSPENDED", RunState.RUNNING, False),
        ("STOPPED", RunState.RUNNING, False),
        ("COMPLETED", RunState.COMPLETED, True),
        ("POWER_UP_NODE", RunState.PENDING, False),
    ],
)
def test_squeue_states_are_mapped(
    make_run: RunMaker, squeue_line: Callable[..., str], word: str, state: RunState, is_final: bool
) -> None:
    run = make_run()
    seen = read_squeue(squeue_line(run, word), [run])[run.id]
    assert (seen.state, seen.is_final, seen.nodes) == (state, is_final, "n[1-2]")


def test_a_listed_job_in_a_state_of_a_newer_slurm_is_not_lost(
    make_run: RunMaker, squeue_line: Callable[..., str]
) -> None:
    run = make_run()
    seen = read_squeue(squeue_line(run, "SOMETHING_NEW"), [run])[run.id]
    assert str(seen) == "running: Slurm reports the state SOMETHING_NEW"


def test_what_sbatch_printed_is_reported_if_it_does_not_end(
    programs: FakePrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.add("sbatch", "exec sleep 60")
    said = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying"  # at MaxJobCount

    def communicate(_: object, timeout: float) -> None:
        raise subprocess.TimeoutExpired("sbatch", timeout, stderr=f"{said}\n".encode())

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.raises(process.ProgramTimeoutError) as late:
        process.run(["sbatch", "job.sbatch"])
    assert late.value.what == f"'sbatch' did not answer within 60 seconds; it printed: {said}"


@pytest.mark.parametrize(
    ("printed", "explained"),
    [
        ("Resources", "Resources: it waits for free nodes"),
        ("JobHeldUser", "JobHeldUser: it is held; to release it: scontrol release 77"),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "its nodes are down or reserved",
        ),
        (
            "ReqNodeNotAvail, Reserved for maintenance",
            "ReqNodeNotAvail: its nodes are down or reserved (Reserved for maintenance)",
        ),
        (
            "ReqNodeNotAvail, UnavailableNodes:n[1-4]",
            "ReqNodeNotAvail: its nodes are down or reserved (UnavailableNodes:n[1-4])",
        ),
        (
            "job requeued in held state",
            "job_requeued_in_held_state: it was requeued and is held; to release it: scontrol release 77",
        ),
        ("QOSMaxGRESPerUser", "QOSMaxGRESPerUser: a limit of your account or its quality of service"),
        ("Dependency", "Dependency: it waits for another job"),
        ("NewInTheNextRelease, with details", "NewInTheNextRelease, with details"),
        ("RaisedSignal:53(Real-time_signal_19)", "RaisedSignal:53(Real-time_signal_19)"),
        ("(Resources)", "Resources: it waits for free nodes"),
        ("None", ""),
    ],
)
def test_the_reason_of_a_pending_job_is_explained(
    make_run: RunMaker, squeue_line: Callable[..., str], printed: str, explained: str
) -> None:
    run = make_run(job_id="77")
    assert read_squeue(squeue_line(run, "PENDING", printed), [run])[run.id].reason == explained


def test_a_canceled_job_is_not_shown_with_the_reason_for_which_it_was_pending(
    make_run: RunMaker, squeue_line: Callable[..., str]
) -> None:
    run = make_run()
    assert read_squeue(squeue_line(run, "CANCELLED", "Resources"), [run])[run.id].reason == ""


@pytest.mark.parametrize(("code", "expected"), [("0:0", 0), ("3:0", 3), ("0:9", 137), ("", None)])
def test_exit_codes_follow_shell_conventions(
    make_run: RunMaker, sacct_line: Callable[..., str], code: str, expected: int | None
) -> None:
    run = make_run()
    assert read_sacct(sacct_line(run, "FAILED", code), [run])[run.id].exit_code == expected


@pytest.mark.parametrize("text", ["nonsense", "1|RUNNING", "|||||||"])
def test_unparsable_output_lines_are_ignored(make_run: RunMaker, text: str) -> None:
    run = make_run(job_id="1")
    assert read_squeue(text, [run]) == {}


def test_a_failing_scancel_is_an_error(slurm: SlurmScheduler, programs: FakePrograms, make_run: RunMaker) -> None:
    programs.answer("scancel", stderr="scancel: error: Kill job error on job id 5: Access/permission denied\n", code=1)
    with pytest.raises(SubmitError, match="permission denied"):
        slurm.cancel([make_run()])


def test_user_formats_do_not_reach_slurms_programs(
    slurm: SlurmScheduler, programs: FakePrograms, make_run: RunMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    programs.add("squeue", 'env >"$0.env"')
    slurm.observe([make_run()])
    seen: Any = (programs.folder / "squeue.env").read_text().splitlines()
    assert "SLURM_TIME_FORMAT=%s" in seen
    assert not [line for line in seen if line.startswith("SQUEUE_PARTITION")]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("enable_configless,enable_expedited_requeue,cloud_dns", ["--requeue=expedite"]),
        ("enable_configless", []),
        ("(null)", []),
    ],
)
def test_a_job_requests_expedited_requeue_if_slurm_supports_it(
    slurm: SlurmScheduler, programs: FakePrograms, make_run: RunMaker, parameters: str, expected: list[str]
) -> None:
    programs.answer("scontrol", f"SLURM_VERSION           = 25.11.4\nSlurmctldParameters     = {parameters}\n")
    programs.answer("sbatch", "5\n")
    slurm.submit(make_run().layout, os.environ)
    assert programs.calls("sbatch") == [" ".join(["sbatch", "--parsable", *expected, "job.sbatch"])]


def test_a_job_with_expedited_requeue_after_a_lost_node_has_not_ended(
    slurm: SlurmScheduler, programs: FakePrograms, make_run: RunMaker, squeue_line: Callable[..., str]
) -> None:
    run = make_run()
    programs.answer("squeue", squeue_line(run, "EXPEDITING"))
    seen = slurm.observe([run])[run.id]
    assert (seen.state, seen.is_final) == (RunState.PENDING, False)
    assert seen.reason == "Slurm restarts it before all other jobs"
