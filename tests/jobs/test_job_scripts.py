"""Execution of job scripts, with stand-ins for srun, scontrol and Python."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waiting import PATIENCE_SECONDS, wait_until

from ftkit.config.cluster import NcclSpec
from ftkit.errors import NoAnswerError, NotFoundError, SubmitError
from ftkit.launch.render import render_array, render_job
from ftkit.planning.layout import DataLayout
from ftkit.runs.ends import excluded_nodes
from ftkit.runs.records import EndRecord, to_line

if TYPE_CHECKING:
    from job_scripts import Machine, PlanMaker

    from ftkit.planning.plan import RunPlan


@pytest.fixture(autouse=True)
def _workspace(make_plan: PlanMaker, machine: Machine) -> None:
    make_plan.workspace = machine.root / "workspace"
    make_plan.python = str(machine.root / "bin" / "python3")


@pytest.fixture(params=["slurm", "local"])
def plan(request: pytest.FixtureRequest, make_plan: PlanMaker, machine: Machine) -> RunPlan:
    """A plan for each template."""
    return make_plan(request.param, 1, node_local_dir=machine.local_disk)


@pytest.fixture
def slurm_plan(make_plan: PlanMaker, machine: Machine) -> RunPlan:
    """A plan for Slurm without a container."""
    return make_plan("dev", 2, node_local_dir=machine.local_disk)


def _end(outcome: str) -> str:
    """Return a trainer script that ends with an end record."""
    line = to_line(EndRecord(time=0.0, outcome=outcome, step=1, training_seconds=1.0, export=None))
    return f"echo '{line}' >metrics.jsonl"


FOR_GOOD = 'touch "$FTKIT_NO_RESTART_FILE"; '
"""What a trainer does whose failure would only come again."""

WAIT_FOR_REQUEST = 'until [[ -e "$FTKIT_STOP_FILE" || ! -e /proc/$TESTS ]]; do sleep 0.01; done; '
"""What a trainer does that is asked to stop; it does not outlive tests that are killed."""


def _finish(job: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = job.communicate(timeout=PATIENCE_SECONDS)
    return job.returncode, said


def _signal_while_training(machine: Machine, plan: RunPlan, number: int) -> tuple[int, str]:
    job = machine.start(plan)
    machine.wait_for_call(1)
    os.kill(job.pid, number)
    return _finish(job)


def _requeued(machine: Machine) -> bool:
    return ["requeue", "12345"] in [call.words for call in machine.calls("scontrol")]


def test_data_is_prepared_once_before_each_node_trains(make_plan: PlanMaker, machine: Machine) -> None:
    plan = make_plan("slurm", 2, node_local_dir=machine.local_disk)
    machine.environment = {"FAKE_NODEID": "1"}

    assert machine.run(plan)[0] == 0

    stages = [call.words[:2] for call in machine.calls("srun")]
    assert stages == [["--nodes=1", "--ntasks=1"], ["--nodes=2", "--ntasks=2"]]
    assert machine.calls("python3")[1].words == [
        "-m", "ftkit.train.launcher", "--node-rank=1", "--nnodes=2", "--nproc-per-node=8", "--rdzv-backend=static",
        "--master-addr=n1", "--master-port=22345", "--max-restarts=0", "-m", "ftkit.train", str(plan.layout.plan), "0",
    ]  # fmt: skip


@pytest.mark.parametrize(("stage", "code"), [("FAKE_PREPARE", 8), ("FAKE_TRAINER", 137)])
def test_the_exit_code_of_a_stage_becomes_the_job_s(stage: str, code: int, plan: RunPlan, machine: Machine) -> None:
    machine.environment = {stage: f"{FOR_GOOD}exit {code}"}
    assert machine.run(plan)[0] == code
    assert machine.exit_code(plan) == code
    assert len(machine.calls("python3")) == (1 if stage == "FAKE_PREPARE" else 2)


def test_a_requeued_job_forgets_its_stop_request_and_its_exit_code(slurm_plan: RunPlan, machine: Machine) -> None:
    layout, job_id = slurm_plan.layout, machine.job_id(slurm_plan)
    layout.root.mkdir(parents=True)
    layout.job_stop_request(job_id).touch()
    layout.job_exit_code(job_id).write_text("1\n", encoding="utf-8")
    machine.environment = {"FAKE_PREPARE": "! compgen -G 'stop-requested*' && ! compgen -G 'exit-code*' || exit 99"}
    assert machine.run(slurm_plan)[0] == 0


def test_a_rejected_second_job_does_not_change_files_of_the_first(plan: RunPlan, machine: Machine) -> None:
    machine.environment = {"FAKE_TRAINER": "until [[ -e go || ! -e /proc/$TESTS ]]; do sleep 0.01; done"}
    job, first = machine.start(plan), machine.job_id(plan)
    machine.wait_for_call(1)
    plan.layout.stop_request.touch()
    plan.layout.job_stop_request(first).touch()

    machine.environment = {"FAKE_PREPARE": "exit 9", "SLURM_JOB_ID": "12346"}
    assert machine.run(plan)[0] == 9
    assert machine.exit_code(plan) == 9
    assert plan.layout.stop_request.exists()
    assert plan.layout.job_stop_request(first).exists()
    assert not plan.layout.job_exit_code(first).exists()

    plan.layout.job_stop_request(first).unlink()  # with it, the job would be requeued
    (plan.layout.root / "go").touch()
    _finish(job)
    assert plan.layout.job_exit_code(first).read_text(encoding="utf-8") == "0\n"


def test_near_the_time_limit_the_trainer_stops_and_the_job_is_requeued(slurm_plan: RunPlan, machine: Machine) -> None:
    machine.environment = {"FAKE_TRAINER": WAIT_FOR_REQUEST + _end("stopped")}
    assert _signal_while_training(machine, slurm_plan, signal.SIGUSR1)[0] == 0
    assert _requeued(machine)
    assert slurm_plan.layout.end_reason.read_text(encoding="utf-8") == "time-limit\t\n"
    assert not list(slurm_plan.layout.root.glob("stop-requested*"))
    assert machine.exit_code(slurm_plan) is None, "a run that continues has no exit code"


@pytest.mark.parametrize(
    ("accounting", "reason"),
    [
        ("REQUEUED NODE_FAIL RUNNING", "node-failure"),
        ("PREEMPTED RUNNING", "preempted"),
        ("REQUEUED PENDING", "requeued"),
        ("RUNNING", None),
    ],
)
def test_a_job_that_slurm_requeued_asks_the_accounting_why(
    accounting: str, reason: str | None, slurm_plan: RunPlan, machine: Machine
) -> None:
    machine.environment = {"SLURM_RESTART_COUNT": "2", "FAKE_ACCOUNTING": accounting}
    assert machine.run(slurm_plan)[0] == 0
    noted = slurm_plan.layout.end_reason
    assert (noted.read_text(encoding="utf-8").strip() if noted.exists() else None) == reason


@pytest.mark.parametrize(
    ("log", "node", "note"),
    [
        ("*** JOB 12345 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO PREEMPTION ***\n", "", None),
        ("", "NodeName=n1\n   State=DOWN+NOT_RESPONDING\n   BootTime=1767225600", "node-failure\tn1"),
        ("", "NodeName=n1\n   State=IDLE\n   BootTime=1767398400 SlurmdStartTime=None", "node-failure\tn1"),
        ("", "NodeName=n1\n   State=IDLE\n   BootTime=1767225600 SlurmdStartTime=None", "preempted"),
        ("", "", "preempted"),
    ],
)
def test_the_log_and_the_node_are_asked_before_the_accounting(
    log: str, node: str, note: str | None, slurm_plan: RunPlan, machine: Machine
) -> None:
    slurm_plan.layout.logs.mkdir(parents=True)
    earlier = "*** JOB 12345 ON n1 CANCELLED AT 2026-01-02T03:00:00 DUE TO NODE FAILURE ***\n"
    slurm_plan.layout.job_log.write_text(f"{earlier}2026-01-02T03:04:00Z ftkit: job 12345 on n[1-2], restart 1\n{log}")
    machine.environment = {"SLURM_RESTART_COUNT": "2", "FAKE_ACCOUNTING": "PREEMPTED", "FAKE_NODE": node}
    assert machine.run(slurm_plan)[0] == 0
    noted = slurm_plan.layout.end_reason
    assert (noted.read_text(encoding="utf-8").strip() if noted.exists() else None) == note
    assert bool(machine.calls("sacct")) == (note == "preempted")


@pytest.mark.parametrize("is_named", [True, False])
def test_a_requeued_job_excludes_the_straggler_found_by_the_trainer(
    is_named: bool, make_plan: PlanMaker, machine: Machine
) -> None:
    resources = make_plan.recipe.resources.model_copy(update={"exclude_stragglers": True})
    make_plan.recipe = make_plan.recipe.model_copy(update={"resources": resources})
    plan = make_plan("dev", 2, node_local_dir=machine.local_disk)
    name = "printf 'h17\\t14%% slower than the others (rank 3)\\n' >stragglers.tsv; " if is_named else ""
    machine.environment = {
        "FAKE_TRAINER": name + WAIT_FOR_REQUEST + _end("stopped"),
        "FAKE_JOB": "   ReqNodeList=(null) ExcNodeList=h3",
    }
    assert _signal_while_training(machine, plan, signal.SIGUSR1)[0] == 0
    said = [call.words for call in machine.calls("scontrol")]
    assert said[-1] == (["update", "jobid=12345", "ExcNodeList=h3,h17"] if is_named else ["requeue", "12345"])
    assert list(excluded_nodes(plan.layout).items()) == (
        [("h17", "14% slower than the others (rank 3)")] if is_named else []
    )


@pytest.mark.parametrize("is_expedited", [True, False])
def test_a_job_that_fails_is_not_held_in_the_queue(is_expedited: bool, slurm_plan: RunPlan, machine: Machine) -> None:
    job = f"JobState=RUNNING ExpeditedRequeue={'Yes' if is_expedited else 'No'}"
    machine.environment = {"FAKE_TRAINER": f"{FOR_GOOD}exit 9", "FAKE_JOB": job}
    assert machine.run(slurm_plan)[0] == 9
    updates = [call.words for call in machine.calls("scontrol") if call.words[0] == "update"]
    assert updates == ([["update", "jobid=12345", "Requeue=0"]] if is_expedited else [])
    assert machine.exit_code(slurm_plan) == 9


@pytest.mark.parametrize("why_not", ["completed", "failed", "canceled", "SIGTERM"])
def test_a_job_is_not_requeued_without_a_reason(why_not: str, slurm_plan: RunPlan, machine: Machine) -> None:
    outcome = _end("completed" if why_not == "completed" else "stopped")
    cancel = "touch canceled; " if why_not == "canceled" else ""
    code = 7 if why_not == "failed" else 0
    machine.environment = {"FAKE_TRAINER": f"{WAIT_FOR_REQUEST}{cancel}{outcome}; exit {code}"}
    number = signal.SIGTERM if why_not == "SIGTERM" else signal.SIGUSR1
    assert _signal_while_training(machine, slurm_plan, number)[0] == code
    assert not _requeued(machine)
    assert machine.exit_code(slurm_plan) == code


def _signal_the_task(machine: Machine, plan: RunPlan, number: int = signal.SIGTERM, stage: int = 1) -> tuple[int, str]:
    """Signal the task as Slurm does before preemption and for scancel --signal: the script does not get the signal.

    If Slurm tracks processes without cgroups, all processes of the task get it.
    """
    job = machine.start(plan)
    machine.wait_for_call(stage)
    for name in ("python3", "srun"):  # Python, which ignores it, ends as soon as the task has requested a stop
        os.kill(machine.calls(name)[stage].pid, number)
    return _finish(job)


@pytest.mark.parametrize("code", [0, 143])
def test_a_preempted_job_stops_and_is_requeued(code: int, slurm_plan: RunPlan, machine: Machine) -> None:
    machine.environment = {"FAKE_TRAINER": f"{WAIT_FOR_REQUEST}{_end('stopped')}; exit {code}"}
    assert _signal_the_task(machine, slurm_plan)[0] == 0
    assert _requeued(machine)
    assert slurm_plan.layout.end_reason.read_text(encoding="utf-8") == "stop-request\t\n"
    assert machine.exit_code(slurm_plan) is None


@pytest.mark.parametrize("job", ["PreemptTime=None", "PreemptTime=2026-01-02T03:04:05"])
def test_tasks_ended_by_a_signal_are_restarted_only_on_preemption(
    job: str, slurm_plan: RunPlan, machine: Machine
) -> None:
    # srun also sends SIGTERM to the other tasks when one has failed; that one would only fail again.
    machine.environment = {"FAKE_TRAINER": f"{WAIT_FOR_REQUEST}{FOR_GOOD}exit 143", "FAKE_JOB": job}
    is_preempted = job != "PreemptTime=None"
    assert _signal_the_task(machine, slurm_plan)[0] == (0 if is_preempted else 143)
    assert _requeued(machine) == is_preempted


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_tasks_is_a_request_to_stop(number: int, slurm_plan: RunPlan, machine: Machine) -> None:
    machine.environment = {"FAKE_TRAINER": WAIT_FOR_REQUEST + _end("stopped")}
    assert _signal_the_task(machine, slurm_plan, number)[0] == 0
    assert _requeued(machine)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_data_preparation_completes_despite_signals_to_the_task(
    number: int, slurm_plan: RunPlan, machine: Machine
) -> None:
    machine.environment = {"FAKE_PREPARE": WAIT_FOR_REQUEST + "touch prepared"}
    assert _signal_the_task(machine, slurm_plan, number, stage=0)[0] == 0
    assert (slurm_plan.layout.root / "prepared").exists()
    assert _requeued(machine)


def test_both_stages_use_the_named_container_of_the_profile(make_plan: PlanMaker, machine: Machine) -> None:
    name = "--container-name=ftkit"
    machine.run(make_plan("slurm", node_local_dir=machine.local_disk, srun_options=(name,)))
    prepare, train = machine.calls("srun")
    for call in (prepare, train):
        assert name in call.words
        assert any(word.startswith("--container-image=") for word in call.words), "the first task creates it"


def test_a_restarted_job_removes_its_containers_that_a_power_cut_left_on_the_nodes(
    make_plan: PlanMaker, machine: Machine
) -> None:
    enroot = machine.root / "bin" / "enroot"
    names = "pyxis_12345.0 pyxis_12345_12345.3 pyxis_123456.0 pyxis_1.12345.0 pyxis_mine"
    enroot.write_text(
        f'#!/bin/bash\n[ "$1" != list ] || exec printf "%s\\n" {names}\necho "$@" >>"$RECORD/removed"\n',
        encoding="utf-8",
    )
    enroot.chmod(0o755)
    plan = make_plan("slurm", node_local_dir=machine.local_disk)
    machine.run(plan)
    assert not (machine.root / "record" / "removed").exists()
    machine.environment = {"SLURM_RESTART_COUNT": "1"}
    assert machine.run(plan)[0] == 0
    removed = (machine.root / "record" / "removed").read_text(encoding="utf-8")
    assert removed == "remove --force pyxis_12345.0 pyxis_12345_12345.3\n"


def test_prepared_data_needs_no_container(plan: RunPlan, machine: Machine) -> None:
    plan.data.root.mkdir(parents=True)
    DataLayout(plan.data.root).manifest.touch()
    code, said = machine.run(plan)
    assert code == 0
    assert "prepared already" in said
    (train,) = machine.calls("python3")
    assert "ftkit.train" in train.words


def test_a_job_with_gpus_does_not_prepare_data_that_was_deleted(slurm_plan: RunPlan, machine: Machine) -> None:
    code, said = machine.run(slurm_plan, prepares=False)
    assert code == machine.exit_code(slurm_plan) == NotFoundError.exit_code
    assert "was deleted" in said
    assert f"ftkit resume {slurm_plan.id}" in said
    assert not machine.calls("srun")
    assert not _requeued(machine)


def test_a_job_that_lost_a_node_is_requeued(slurm_plan: RunPlan, machine: Machine) -> None:
    machine.environment = {"FAKE_TRAINER": "exit 1", "FAKE_PROBE_ALL": "233"}
    code, said = machine.run(slurm_plan)
    assert code == 0
    assert "no longer answers" in said
    assert _requeued(machine)
    assert machine.exit_code(slurm_plan) is None


def test_requeueing_after_a_lost_node_is_left_to_slurm(slurm_plan: RunPlan, machine: Machine) -> None:
    machine.environment = {
        "FAKE_TRAINER": FOR_GOOD + "exit 1",
        "FAKE_PROBE_ALL": "233",
        "FAKE_CONFIG": "SlurmdTimeout           = 300 sec",
    }
    sleep = machine.root / "bin" / "sleep"
    sleep.write_text('#!/bin/bash\necho "$1" >slept\nkill -TERM "$PPID"\n', encoding="utf-8")
    sleep.chmod(0o755)
    assert machine.run(slurm_plan)[0] == 1
    assert (slurm_plan.layout.root / "slept").read_text(encoding="utf-8") == "660\n"
    assert not _requeued(machine)


@pytest.mark.parametrize(
    ("why_not", "environment"),
    [
        ("all nodes answer", {}),
        ("srun does not work at all", {"FAKE_PROBE_ALL": "1", "FAKE_PROBE_HERE": "1"}),
        ("canceled", {"FAKE_PROBE_ALL": "1", "FAKE_TRAINER": "touch canceled; exit 1"}),
        ("completed", {"FAKE_PROBE_ALL": "1", "FAKE_TRAINER": _end("completed") + "; exit 1"}),
    ],
)
def test_a_failure_without_a_lost_node_stays_a_failure(
    why_not: str, environment: dict[str, str], slurm_plan: RunPlan, machine: Machine
) -> None:
    machine.environment = {"FAKE_TRAINER": FOR_GOOD + "exit 1", **environment}
    assert machine.run(slurm_plan)[0] == 1, why_not
    assert not _requeued(machine)
    assert machine.exit_code(slurm_plan) == 1


def test_a_single_node_job_does_not_look_for_lost_nodes(make_plan: PlanMaker, machine: Machine) -> None:
    machine.environment = {"FAKE_TRAINER": FOR_GOOD + "exit 1"}
    assert machine.run(make_plan("dev", 1, node_local_dir=machine.local_disk))[0] == 1
    assert len(machine.calls("srun")) == 2


SLEEP = """#!/bin/bash
[[ $1 == 0.* ]] && exec /bin/sleep "$@"
echo "$1" >>slept
[[ -z ${FAKE_SLEEP-} ]] || { kill -USR1 "$PPID"; exec /bin/sleep 3600; }
"""


@pytest.fixture
def _no_delay(machine: Machine) -> None:
    """Record for how long a script would sleep, without sleeping."""
    sleep = machine.root / "bin" / "sleep"
    sleep.write_text(SLEEP, encoding="utf-8")
    sleep.chmod(0o755)


def _slept(plan: RunPlan) -> list[int]:
    return [int(line) for line in (plan.layout.root / "slept").read_text(encoding="utf-8").split()]


@pytest.mark.usefixtures("_no_delay")
def test_failed_training_restarts_until_it_fails_too_often_in_a_row(plan: RunPlan, machine: Machine) -> None:
    # The third start writes a checkpoint, which resets the count.
    machine.environment = {"FAKE_TRAINER": "[[ ${!#} != 2 ]] || mkdir -p checkpoints/step-000010; exit 137"}
    code, said = machine.run(plan)
    assert (code, machine.exit_code(plan)) == (137, 137)
    assert _slept(plan) == [5, 10, 5, 10, 20]
    assert "restart 1 of" in said
    starts = [call.words[-1] for call in machine.calls("python3") if "ftkit.train" in call.words]
    assert starts == [str(number) for number in range(len(starts))]


# What Slurm 22.05 printed while its controller was down, stopped, or answered with garbage; newer ones limit rates.
NO_ANSWERS = (
    "srun: error: Unable to confirm allocation for job 1: Unable to contact slurm controller (connect failure)",
    "srun: error: Unable to confirm allocation for job 1: Socket timed out on send/recv operation",
    "srun: error: Unable to confirm allocation for job 1: Unspecified error",
    "srun: error: Unable to confirm allocation for job 1: Insane message length",
    "srun: error: Unable to create step for job 1: Rate limit exceeded, please retry momentarily",
    "srun: error: Unable to create step for job 1: Job/step already completing or completed",
)


@pytest.mark.usefixtures("_no_delay")
@pytest.mark.parametrize("words", NO_ANSWERS)
def test_a_launch_that_slurms_controller_does_not_answer_is_no_attempt(
    words: str, slurm_plan: RunPlan, machine: Machine
) -> None:
    machine.environment = {"FAKE_OUTAGE": "1 2 3", "FAKE_WORDS": words}
    code, said = machine.run(slurm_plan)
    assert (code, _slept(slurm_plan)) == (0, [10, 20, 40])
    assert "restart" not in said.partition("training")[2]
    assert len([call for call in machine.calls("python3") if "ftkit.train" in call.words]) == 1
    assert slurm_plan.layout.job_log.read_text().count("waiting for Slurm's controller since 20") == 3


@pytest.mark.usefixtures("_no_delay")
def test_nodes_are_checked_and_jobs_requeued_once_slurms_controller_answers(
    slurm_plan: RunPlan, machine: Machine
) -> None:
    words = "Unexpected message received for job 12345"  # what scontrol prints
    machine.environment = {"FAKE_TRAINER": "exit 1", "FAKE_PROBE_ALL": "233", "FAKE_WORDS": words}
    machine.environment |= {"FAKE_OUTAGE": "2 4"}
    code, _ = machine.run(slurm_plan)
    assert code == 0
    assert [call.words for call in machine.calls("scontrol")].count(["requeue", "12345"]) == 2


@pytest.mark.usefixtures("_no_delay")
def test_a_start_whose_job_was_requeued_during_an_outage_only_waits_until_slurm_ends_it(
    slurm_plan: RunPlan, machine: Machine
) -> None:
    machine.environment = {"FAKE_OUTAGE": "1", "FAKE_WORDS": NO_ANSWERS[0]}
    machine.environment |= {"FAKE_JOB": "   Requeue=1 Restarts=1 BatchFlag=1"}
    machine.run(slurm_plan)
    assert (slurm_plan.layout.root / "slept").read_text(encoding="utf-8").split() == ["10", "infinity"]
    assert not [call for call in machine.calls("python3") if "ftkit.train" in call.words]
    assert not list(slurm_plan.layout.root.glob("exit-code-*"))


@pytest.mark.usefixtures("_no_delay")
def test_the_wait_for_slurms_controller_ends_with_the_jobs_time(slurm_plan: RunPlan, machine: Machine) -> None:
    machine.environment = {
        "FAKE_OUTAGE": "1", "FAKE_WORDS": NO_ANSWERS[0], "FAKE_JOB": "   StartTime=1 EndTime=2 Deadline=N/A"
    }  # fmt: skip
    assert machine.run(slurm_plan)[0] == machine.exit_code(slurm_plan) == NoAnswerError.exit_code


@pytest.mark.usefixtures("_no_delay")
def test_an_error_of_a_step_that_slurm_has_started_is_a_failed_attempt(slurm_plan: RunPlan, machine: Machine) -> None:
    words = "srun: error: Task launch for StepId=1.0 failed on node n2: Connection refused"
    machine.environment = {"FAKE_OUTAGE": "1", "FAKE_WORDS": words}
    assert machine.run(slurm_plan)[0] == 0
    assert _slept(slurm_plan) == [5]


@pytest.mark.usefixtures("_no_delay")
def test_an_unresponsive_node_is_replaced_while_there_are_spare_nodes(make_plan: PlanMaker, machine: Machine) -> None:
    resources = make_plan.recipe.resources.model_copy(update={"spare_nodes": 1})
    make_plan.recipe = make_plan.recipe.model_copy(update={"resources": resources})
    plan = make_plan("dev", 2, node_local_dir=machine.local_disk)
    machine.environment = {"FAKE_TRAINER": "exit 1", "FAKE_DEAD": "n1", "FAKE_NODES": "n1 n2 n3"}
    assert machine.run(plan)[0] == 1  # n2 and n3 respond: training itself fails
    trained = [call.words for call in machine.calls("srun") if "ftkit.train" in call.words]
    nodes = [word for words in trained for word in words if word.startswith(("--nodelist", "--master-addr"))]
    expected = ["--nodelist=n1,n2", "--master-addr=n1", *3 * ["--nodelist=n2,n3", "--master-addr=n2"]]
    assert sorted(nodes) == sorted(expected)
    assert not _requeued(machine)

    machine.environment["FAKE_DEAD"] = "n1 n2"
    assert machine.run(plan)[0] == 0
    assert _requeued(machine)
    script = plan.layout.script.read_text(encoding="utf-8")
    assert "#SBATCH --nodes=3\n#SBATCH --no-kill\n" in script


@pytest.mark.usefixtures("_no_delay")
def test_training_continues_on_the_nodes_that_are_left_if_they_divide_the_batch(
    make_plan: PlanMaker, machine: Machine
) -> None:
    resources = make_plan.recipe.resources.model_copy(update={"min_nodes": 2})
    make_plan.recipe = make_plan.recipe.model_copy(update={"resources": resources})
    plan = make_plan("dev", 4, node_local_dir=machine.local_disk)
    machine.environment = {"FAKE_TRAINER": "exit 1", "FAKE_DEAD": "n2", "FAKE_NODES": "n1 n2 n3 n4"}
    assert machine.run(plan)[0] == 1
    trained = [call.words for call in machine.calls("srun") if "ftkit.train" in call.words]
    starts = [[word for word in words if word.startswith(("--nodes=", "--ntasks=", "--nodelist=", "--nnodes="))]
              for words in trained]  # fmt: skip
    whole = ["--nodes=4", "--ntasks=4", "--nodelist=n1,n2,n3,n4", "--nnodes=4"]
    # Six processes on three nodes would not divide a batch of 64 packs.
    assert sorted(starts) == sorted([whole, *3 * [["--nodes=2", "--ntasks=2", "--nodelist=n1,n3", "--nnodes=2"]]])
    assert not _requeued(machine)
    assert "#SBATCH --nodes=4\n#SBATCH --no-kill\n" in plan.layout.script.read_text(encoding="utf-8")

    machine.environment["FAKE_DEAD"] = "n1 n2 n3"
    assert machine.run(plan)[0] == 0
    assert _requeued(machine)


@pytest.mark.usefixtures("_no_delay")
def test_a_silent_node_ends_srun_and_is_replaced(make_plan: PlanMaker, machine: Machine) -> None:
    resources = make_plan.recipe.resources.model_copy(update={"spare_nodes": 1})
    make_plan.recipe = make_plan.recipe.model_copy(update={"resources": resources})
    plan = make_plan("dev", 2, node_local_dir=machine.local_disk)
    hangs = "while [[ -e /proc/$PPID ]]; do sleep 0.01; done"
    falls_silent = f"mkdir silent; printf '1700000000\\tn1\\n' >silent/n2; {hangs}"
    machine.environment = {
        "FAKE_TRAINER": f"[[ ${{!#}} != 0 ]] || {{ {falls_silent}; exit 1; }}",
        "FAKE_DEAD": "n2",
        "FAKE_NODES": "n1 n2 n3",
    }
    assert machine.run(plan)[0] == 0
    heard = [call.environment["FTKIT_NODES"] for call in machine.calls("python3") if "ftkit.train" in call.words]
    assert heard == ["12345.0.0 n1 n2", "12345.0.1 n1 n3"]
    assert plan.layout.end_reason.read_text(encoding="utf-8") == "node-failure\tn2, silent since 22:13:20 UTC\n"
    assert not plan.layout.silent_nodes.exists()


@pytest.mark.usefixtures("_no_delay")
@pytest.mark.parametrize("why_not", ["a reason that comes again", "canceled", "completed"])
def test_training_does_not_restart_if_a_restart_cannot_help(why_not: str, plan: RunPlan, machine: Machine) -> None:
    ends = {
        "a reason that comes again": FOR_GOOD,
        "canceled": "touch canceled; ",
        "completed": _end("completed") + "; ",
    }
    machine.environment = {"FAKE_TRAINER": f"{ends[why_not]}exit 9"}
    assert machine.run(plan)[0] == 9
    assert len(machine.calls("python3")) == 2


@pytest.mark.usefixtures("_no_delay")
def test_a_job_that_runs_out_of_time_before_a_restart_is_requeued(slurm_plan: RunPlan, machine: Machine) -> None:
    machine.environment = {"FAKE_TRAINER": "exit 1", "FAKE_SLEEP": "until the time is up"}
    assert machine.run(slurm_plan)[0] == 0
    assert _requeued(machine)
    assert len(machine.calls("python3")) == 2


def test_a_completed_run_that_is_extended_is_requeued(slurm_plan: RunPlan, machine: Machine) -> None:
    slurm_plan.layout.root.mkdir(parents=True)
    record = to_line(EndRecord(time=0.0, outcome="completed", step=1, training_seconds=1.0, export=None))
    slurm_plan.layout.metrics.write_text(record + "\n", encoding="utf-8")  # of the previous job
    machine.environment = {"FAKE_TRAINER": WAIT_FOR_REQUEST}
    assert _signal_while_training(machine, slurm_plan, signal.SIGUSR1)[0] == 0
    assert _requeued(machine)


def test_a_rejected_requeue_is_a_failure(slurm_plan: RunPlan, machine: Machine) -> None:
    machine.environment = {"FAKE_TRAINER": WAIT_FOR_REQUEST + _end("stopped"), "FAKE_REQUEUE_CODE": "1"}
    code, said = _signal_while_training(machine, slurm_plan, signal.SIGUSR1)
    assert "refused to requeue" in said
    assert code == machine.exit_code(slurm_plan) == SubmitError.exit_code


def test_data_preparation_completes_before_a_job_is_requeued(slurm_plan: RunPlan, machine: Machine) -> None:
    machine.environment = {"FAKE_PREPARE": WAIT_FOR_REQUEST + "touch prepared"}
    job = machine.start(slurm_plan)
    machine.wait_for_call(0)
    os.kill(job.pid, signal.SIGUSR1)
    assert _finish(job)[0] == 0
    assert (slurm_plan.layout.root / "prepared").exists()
    assert len(machine.calls("python3")) == 1
    assert _requeued(machine)


def test_the_first_sigterm_to_a_local_run_requests_a_checkpoint(make_plan: PlanMaker, machine: Machine) -> None:
    plan = make_plan("local", 1, node_local_dir=machine.local_disk)
    machine.environment = {"FAKE_TRAINER": WAIT_FOR_REQUEST + _end("stopped")}
    assert _signal_while_training(machine, plan, signal.SIGTERM)[0] == 0
    assert machine.exit_code(plan) == 0


def test_a_second_sigterm_to_a_local_run_ends_all_processes(make_plan: PlanMaker, machine: Machine) -> None:
    plan = make_plan("local", 1, node_local_dir=machine.local_disk)
    machine.environment = {"FAKE_TRAINER": "exec sleep 3600"}
    job = machine.start(plan)
    machine.wait_for_call(1)
    os.kill(job.pid, signal.SIGTERM)
    wait_until(plan.layout.job_stop_request(machine.job_id(plan)).exists)
    os.kill(job.pid, signal.SIGTERM)
    assert _finish(job)[0] == 143
    assert machine.exit_code(plan) == 143


def test_sigterm_to_a_local_run_ends_data_preparation_immediately(make_plan: PlanMaker, machine: Machine) -> None:
    plan = make_plan("local", 1, node_local_dir=machine.local_disk)
    machine.environment = {"FAKE_PREPARE": "exec sleep 3600"}
    job = machine.start(plan)
    machine.wait_for_call(0)
    os.kill(job.pid, signal.SIGTERM)
    assert _finish(job)[0] == 143
    assert len(machine.calls("python3")) == 1


def test_a_missing_image_is_reported(make_plan: PlanMaker, machine: Machine) -> None:
    plan = make_plan("slurm")
    code, said = machine.run(plan, with_image=False)
    assert code == 4
    assert f"the container image {plan.container_image} does not exist" in said
    assert not machine.calls("srun")


def _run_with_profile(machine: Machine, make_plan: PlanMaker, profile: str | None) -> str:
    script = machine.root / "nccl profile.sh"
    if profile is not None:
        script.write_text(profile, encoding="utf-8")
    nccl = NcclSpec(profile_script=str(script), library_dir="/plug in/lib64", environment={"NCCL_LIB_DIR": "/plug in"})
    machine.environment = {"LD_LIBRARY_PATH": "/submit/host"}
    code, said = machine.run(make_plan("slurm", nccl=nccl, node_local_dir=machine.local_disk))
    assert code == 0, said
    return said


def test_the_sites_script_may_use_unset_variables_and_failing_commands(make_plan: PlanMaker, machine: Machine) -> None:
    profile = 'false; export NCCL_FROM_SITE="$NCCL_LIB_DIR$NEVER_SET"; false | true; false\n'
    _run_with_profile(machine, make_plan, profile)
    train = machine.calls("srun")[1]
    assert train.environment["NCCL_FROM_SITE"] == "/plug in"
    (names,) = [word for word in train.words if word.startswith("--container-env=")]
    assert {"NCCL_FROM_SITE", "NCCL_LIB_DIR", "OMP_NUM_THREADS", "HF_HOME"} <= set(names.partition("=")[2].split(","))


def test_a_missing_site_script_is_a_warning(make_plan: PlanMaker, machine: Machine) -> None:
    assert "nccl profile.sh is not" in _run_with_profile(machine, make_plan, None)


def test_the_plugins_libraries_come_first_only_in_the_task(make_plan: PlanMaker, machine: Machine) -> None:
    _run_with_profile(machine, make_plan, "")
    assert "LD_LIBRARY_PATH" not in machine.calls("srun")[1].environment
    assert machine.calls("python3")[1].environment["LD_LIBRARY_PATH"] == "/plug in/lib64"


FROM_THE_SHELL = {"PYTHONPATH": "/host", "CONDA_PREFIX": "/conda", "VIRTUAL_ENV": "/venv", "LD_PRELOAD": ""}


@pytest.mark.parametrize(("cluster", "kept"), [("slurm", set()), ("dev", set(FROM_THE_SHELL))])
def test_python_variables_of_the_submitting_shell_do_not_reach_containers(
    cluster: str, kept: set[str], make_plan: PlanMaker, machine: Machine
) -> None:
    machine.environment = dict(FROM_THE_SHELL)
    machine.run(make_plan(cluster, node_local_dir=machine.local_disk))
    assert set(machine.calls("srun")[0].environment) & set(FROM_THE_SHELL) == kept


def test_the_hub_token_is_found_although_hf_home_changes(plan: RunPlan, machine: Machine) -> None:
    token = machine.root / "home" / ".cache" / "huggingface" / "token"
    token.parent.mkdir(parents=True)
    token.write_text("its text", encoding="utf-8")
    _, said = machine.run(plan)
    train = machine.calls("python3")[1]
    assert train.environment["HF_TOKEN"] == token.read_text(encoding="utf-8")
    assert train.environment["HF_HOME"] == f"{plan.workspace}/huggingface"
    assert "its text" not in said + str([call.words for call in machine.calls("srun")])


def test_the_older_token_variable_works_too(make_plan: PlanMaker, machine: Machine) -> None:
    machine.environment = {"HUGGING_FACE_HUB_TOKEN": "its text"}
    machine.run(make_plan("slurm", node_local_dir=machine.local_disk))
    assert machine.calls("python3")[1].environment["HF_TOKEN"] == "its text"  # noqa: S105 - no password


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD"])
def test_a_trackers_key_reaches_the_trainer_without_being_written(
    name: str, make_plan: PlanMaker, machine: Machine
) -> None:
    machine.environment = {name: "its text"}
    plan = make_plan("slurm", node_local_dir=machine.local_disk)
    _, said = machine.run(plan)
    train = machine.calls("srun")[1]
    (names,) = [word for word in train.words if word.startswith("--container-env=")]
    assert name in names.partition("=")[2].split(",")
    assert machine.calls("python3")[1].environment[name] == "its text"
    assert "its text" not in said + plan.layout.script.read_text(encoding="utf-8") + str(train.words)


def test_a_users_hf_home_is_kept_and_mounted(make_plan: PlanMaker, machine: Machine) -> None:
    chosen = f"{machine.root}/hub"
    machine.environment = {"HF_HOME": chosen}
    machine.run(make_plan("slurm", node_local_dir=machine.local_disk))
    call = machine.calls("srun")[0]
    assert call.environment["HF_HOME"] == chosen
    assert any(word.startswith("--container-mounts=") and f",{chosen}:{chosen}" in word for word in call.words)


def test_a_cache_folder_of_another_user_is_rejected(plan: RunPlan, machine: Machine) -> None:
    link = machine.root / "local-disk" / f"ftkit-{os.getuid()}"
    link.symlink_to(machine.root / "home")
    code, said = machine.run(plan)
    assert code == 5
    assert f"{link} on " in said


def test_caches_are_private_to_the_user(plan: RunPlan, machine: Machine) -> None:
    machine.run(plan)
    folder = machine.root / "local-disk" / f"ftkit-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert machine.calls("python3")[1].environment["TRITON_CACHE_DIR"] == f"{folder}/triton"


@pytest.fixture
def checked_plan(make_plan: PlanMaker, machine: Machine) -> RunPlan:
    """A plan for Slurm with a preflight; srun's stand-in runs the commands of both nodes."""
    make_plan.recipe = make_plan.recipe.model_copy(
        update={"resources": make_plan.recipe.resources.model_copy(update={"preflight": True})}
    )
    plan = make_plan("dev", 2, node_local_dir=machine.local_disk)
    plan.layout.plan.parent.mkdir(parents=True)
    plan.layout.plan.touch()
    return plan


APPTAINER_ERROR = """FATAL: no loop device
srun: error: n2: task 0: Exited with exit code 255
"""
ENROOT_ERROR = """slurmstepd-n2: error: pyxis: child 1027 failed with error code: 1
slurmstepd-n2: error: pyxis: failed to create container filesystem for image: /shared/ftkit/images/big.sqsh
slurmstepd-n2: error: pyxis: printing enroot log file:
slurmstepd-n2: error: pyxis:     [INFO] Extracting squashfs filesystem...
slurmstepd-n2: error: pyxis:     Write on output file failed because No space left on device
slurmstepd-n2: error: pyxis:     FATAL ERROR: writer: failed to write file /mnt/localssd/data/pyxis_14.0/var/big
slurmstepd-n2: error: pyxis:     Parallel unsquashfs: Using 2 processors
slurmstepd-n2: error: pyxis:     \x20
slurmstepd-n2: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
slurmstepd-n2: error: Failed to invoke spank plugin stack
srun: error: n2: task 0: Exited with exit code 1
"""
"""What enroot 4.1.2 and pyxis 0.24.0 printed on a full disk."""


def _check(verdicts: dict[str, str], stderr: str = APPTAINER_ERROR) -> str:
    """Return a script for Python's stand-in: nodes print a verdict, or, without one, fail to start a container."""
    cases = "".join(
        f"*--host={host}*) echo 'ftkit-node {host} {said}' ;; "
        if said
        else f"*--host={host}*) printf %s {shlex.quote(stderr)} >&2; exit 255 ;; "
        for host, said in verdicts.items()
    )
    return f'case "$*" in *ftkit.health*) case "$*" in {cases} esac; exit ;; esac; '


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        (APPTAINER_ERROR, "FATAL: no loop device"),
        (ENROOT_ERROR, "Write on output file failed because No space left on device"),
        (
            ENROOT_ERROR.replace("slurmstepd-n2:", "[2026-11-26T21:09:23.012]"),  # Slurm 26.05
            "Write on output file failed because No space left on device",
        ),
    ],
)
def test_a_node_that_fails_its_check_is_excluded_with_the_reason(
    stderr: str, reason: str, checked_plan: RunPlan, machine: Machine
) -> None:
    machine.environment["FAKE_PREPARE"] = _check({"n1": "ok", "n2": ""}, stderr)
    machine.environment["FAKE_JOB"] = "ExcNodeList=n9"
    code, _ = machine.run(checked_plan)
    assert code == 0
    log = checked_plan.layout.job_log.read_text()
    assert f"preflight: n2: the checks did not run: {reason}\n" in log
    asked = [call.words for call in machine.calls("scontrol")]
    assert ["requeue", "12345"] in asked
    assert ["update", "jobid=12345", "ExcNodeList=n9,n2"] in asked
    assert checked_plan.layout.excluded_nodes.read_text().split("\t")[1:3] == ["12345", "n2"]
    assert machine.exit_code(checked_plan) is None
    assert not any("ftkit.train.launcher" in call.words for call in machine.calls("python3"))


@pytest.mark.parametrize(
    ("verdicts", "expected"), [({"n1": "ok", "n2": "ok"}, 0), ({"n1": "bad driver", "n2": "bad driver"}, 12)]
)
def test_training_starts_unless_every_node_fails(
    checked_plan: RunPlan, machine: Machine, verdicts: dict[str, str], expected: int
) -> None:
    machine.environment["FAKE_PREPARE"] = _check(verdicts)
    code, _ = machine.run(checked_plan)
    assert (code, machine.exit_code(checked_plan)) == (expected, expected)
    has_trained = any("ftkit.train.launcher" in call.words for call in machine.calls("python3"))
    assert has_trained == (expected == 0)


def test_a_node_that_does_not_see_the_run_folder_excludes_itself(checked_plan: RunPlan, machine: Machine) -> None:
    checked_plan.layout.plan.unlink()
    code, _ = machine.run(checked_plan)
    assert code == 12
    expected = ["update", "jobid=12345", "ExcNodeList=n1", "Comment=ftkit-excluded n1"]
    assert expected in [call.words for call in machine.calls("scontrol")]
    checked_plan.layout.plan.touch()
    machine.environment["FAKE_JOB"] = "   Comment=ftkit-excluded n1"
    machine.environment["FAKE_PREPARE"] = _check({"n1": "ok", "n2": "ok"})
    machine.run(checked_plan)
    assert "can't access" in checked_plan.layout.excluded_nodes.read_text()


def test_the_image_is_staged_once_and_verified_or_else_started_from_the_shared_file_system(
    make_plan: PlanMaker, machine: Machine
) -> None:
    make_plan.workspace = machine.root / "shared"
    plan = make_plan("slurm", 2, node_local_dir=machine.local_disk, stage="local")
    assert plan.container_image
    plan.layout.logs.mkdir(parents=True)
    image = Path(plan.container_image)
    image.parent.mkdir()
    image.write_text("an image")
    staged = Path(machine.local_disk, f"ftkit-{os.getuid()}", "images", image.name)

    def started() -> tuple[str, int]:
        shutil.rmtree(machine.root / "record")
        (machine.root / "record").mkdir()
        assert machine.run(plan, with_image=False)[0] == 0
        prefix = "--container-image="
        (word,) = (word for word in machine.calls("srun")[-1].words if word.startswith(prefix))
        return word.removeprefix(prefix), len(machine.calls("sbcast"))

    assert started() == (str(staged), 1)
    assert staged.read_text() == "an image"
    assert started() == (str(staged), 0)  # staged already
    staged.write_text("damaged")
    interrupted, in_progress = (staged.with_name(f"{staged.name}.{job}") for job in (11, 12))
    interrupted.touch()
    os.utime(interrupted, (0, 0))
    in_progress.touch()
    assert started() == (str(staged), 1)
    assert staged.read_text() == "an image"
    assert (interrupted.exists(), in_progress.exists()) == (False, True)
    staged.write_text("damaged")
    machine.environment = {"FAKE_FULL_DISK": "1"}
    assert started() == (str(image), 1)


@pytest.mark.parametrize("is_taken", [True, False])
def test_all_tasks_get_a_port_of_the_first_node_that_nothing_listens_on(
    is_taken: bool, make_plan: PlanMaker, machine: Machine
) -> None:
    first = 13_000 + 100 * (os.getpid() % 30)  # concurrent tests use other ports
    for job in range(first, first + 100, 20):
        with suppress(OSError), socket.create_server(("127.0.0.1", 20_000 + job % 10_000)) as server:
            machine.environment = {"FAKE_NODES": "localhost", "SLURM_JOB_ID": str(job)}
            if not is_taken:
                server.close()
            machine.run(make_plan("dev", 1, node_local_dir=machine.local_disk))
            break
    _, train = machine.calls("srun")
    assert f"--master-port={20_000 + job % 10_000 + 10 * is_taken}" in train.words


def test_the_tasks_use_no_mpi_and_all_cpus_unless_the_profile_says_otherwise(
    make_plan: PlanMaker, machine: Machine
) -> None:
    machine.run(make_plan("dev", 1, node_local_dir=machine.local_disk))
    machine.run(make_plan("dev", 1, node_local_dir=machine.local_disk, mpi="pmix", cpus_per_node=4))
    (*_, plain), (*_, with_mpi) = machine.calls("srun")[:2], machine.calls("srun")[2:]
    assert {"--mpi=none", "--cpu-bind=none"} <= set(plain.words)
    assert {"--mpi=pmix", "--cpus-per-task=4"} <= set(with_mpi.words)
    assert "--cpu-bind=none" not in with_mpi.words


# --- Tasks of a job array ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [3, 14])
def test_a_task_of_a_job_array_executes_the_script_of_its_run(
    number: int, make_plan: PlanMaker, machine: Machine
) -> None:
    make_plan.workspace = machine.root / "it's 100% $(odd)"
    first, plan = make_plan.in_sweep("dev", 1), make_plan.in_sweep("dev", number)
    plan.layout.root.mkdir(parents=True)
    plan.layout.script.write_text('printf "%s" "$0"', encoding="utf-8")
    array = machine.root / "array.sbatch"
    array.write_text(render_array(first, first.layout.script, render_job(first)), encoding="utf-8")
    done = subprocess.run(
        ["bash", str(array)], env={"SLURM_ARRAY_TASK_ID": str(number)}, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == (str(plan.layout.script), "")
    (log,) = [line for line in array.read_text(encoding="utf-8").splitlines() if "--output=" in line]
    assert "it's 100%% " in log
    assert log.endswith('-%a-20260102T030405Z-4f2a%a/logs/job.log"')


TASK = {"SLURM_ARRAY_JOB_ID": "12345", "SLURM_ARRAY_TASK_ID": "7"}
"""Variables of the task whose own number is the array's: Slurm would apply a command with it to all tasks."""


def _jobs_named_to_slurm(machine: Machine) -> set[str]:
    words = [word for name in ("scontrol", "sacct") for call in machine.calls(name) for word in call.words]
    return {match[0] for word in words if (match := re.search(r"12345\w*", word))}


def test_a_task_of_a_job_array_requeues_itself_and_not_the_array(slurm_plan: RunPlan, machine: Machine) -> None:
    machine.environment = TASK | {"FAKE_TRAINER": WAIT_FOR_REQUEST + _end("stopped"), "SLURM_RESTART_COUNT": "1"}
    assert _signal_while_training(machine, slurm_plan, signal.SIGUSR1)[0] == 0
    assert ["requeue", "12345_7"] in [call.words for call in machine.calls("scontrol")]
    assert _jobs_named_to_slurm(machine) == {"12345_7"}


def test_a_task_of_a_job_array_excludes_nodes_for_itself(checked_plan: RunPlan, machine: Machine) -> None:
    machine.environment |= TASK | {"FAKE_PREPARE": _check({"n1": "ok", "n2": ""}, APPTAINER_ERROR)}
    assert machine.run(checked_plan)[0] == 0
    assert checked_plan.layout.excluded_nodes.read_text().split("\t")[1:3] == ["12345_7", "n2"]
    checked_plan.layout.plan.unlink()
    assert machine.run(checked_plan)[0] == 12
    assert _jobs_named_to_slurm(machine) == {"12345_7"}


def test_a_node_that_does_not_see_the_run_folders_of_an_array_excludes_itself_from_a_task(
    make_plan: PlanMaker, machine: Machine
) -> None:
    resources = make_plan.recipe.resources.model_copy(update={"preflight": True})
    make_plan.recipe = make_plan.recipe.model_copy(update={"resources": resources})
    plan = make_plan.in_sweep("dev", 7)
    array = machine.root / "array.sbatch"
    array.write_text(render_array(plan, plan.layout.script, render_job(plan)), encoding="utf-8")
    machine.environment = TASK
    done = subprocess.run(["bash", str(array)], env=machine._environment(), check=False)
    assert done.returncode == 12
    expected = ["update", "jobid=12345_7", "ExcNodeList=n1", "Comment=ftkit-excluded n1"]
    assert expected in [call.words for call in machine.calls("scontrol")]
    assert _jobs_named_to_slurm(machine) == {"12345_7"}
