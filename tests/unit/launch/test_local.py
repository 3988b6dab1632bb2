from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waiting import wait_until

from ftkit import process
from ftkit.launch.job_states import observe
from ftkit.launch.scheduler import LocalScheduler
from ftkit.launch.submission import cancel
from ftkit.runs.job import Cause, RunState, SubmittedRun
from ftkit.runs.lease import Holder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import RunMaker

POLITE = """
trap 'kill $child; wait $child; echo stopping; echo 0 >exit-code-$$; exit 0' TERM
sleep 3600 &
child=$!
echo ready >ready
wait $child
"""
STUBBORN = "trap '' TERM; echo ready >ready; while :; do sleep 0.02; done"


@pytest.fixture
def started(make_run: RunMaker) -> Iterator[Callable[[str], SubmittedRun]]:
    """Start a real process; kill what remains of it at the end."""
    runs: list[SubmittedRun] = []

    def start(script: str) -> SubmittedRun:
        run = make_run(scheduler="local")
        run.layout.script.write_text(script)
        runs.append(SubmittedRun(run.layout, LocalScheduler().submit(run.layout, os.environ)))
        return runs[-1]

    yield start
    for run in runs:
        if process.group_members(int(run.job_id)):
            process.signal_group(int(run.job_id), signal.SIGKILL)


def test_a_script_runs_in_its_folder_in_a_new_session(started: Callable[[str], SubmittedRun]) -> None:
    run = started("pwd; ps=$(cut -d' ' -f6 /proc/$$/stat); echo session $ps of $$; echo 0 >exit-code-$$")
    wait_until(lambda: observe(run).is_final)
    pid = run.job_id
    assert run.layout.job_log.read_text().split("\n")[:2] == [str(run.layout.root), f"session {pid} of {pid}"]
    assert observe(run).state is RunState.COMPLETED


def test_a_script_is_running_until_it_ends(started: Callable[[str], SubmittedRun]) -> None:
    run = started("while [ ! -e go ]; do sleep 0.01; done; echo 3 >exit-code-$$; exit 3")
    seen = observe(run)
    assert (seen.state, seen.is_final) == (RunState.RUNNING, False)
    (run.layout.root / "go").touch()
    wait_until(lambda: observe(run).is_final)
    assert (observe(run).state, observe(run).exit_code) == (RunState.FAILED, 3)


def test_a_killed_script_is_reported_as_failed(started: Callable[[str], SubmittedRun]) -> None:
    run = started("exec sleep 3600")
    os.kill(int(run.job_id), signal.SIGKILL)
    wait_until(lambda: observe(run).is_final)
    assert observe(run).state is RunState.FAILED
    assert observe(run).cause is Cause.KILLED
    assert "killed" in observe(run).reason


def test_a_run_that_a_restart_of_the_machine_ended_says_so(
    started: Callable[[str], SubmittedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started("exec sleep 3600")
    os.kill(int(run.job_id), signal.SIGKILL)
    monkeypatch.setattr(process, "system_start", lambda: run.submission.submitted + 60)
    wait_until(lambda: observe(run).is_final)
    assert (observe(run).state, observe(run).cause) == (RunState.FAILED, Cause.REBOOT)
    assert "was restarted" in observe(run).reason


def test_the_start_of_this_system_is_before_that_of_this_process() -> None:
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    assert time.time() - uptime - 2 <= process.system_start() <= time.time()


def test_remaining_processes_of_a_killed_script_count_as_running(started: Callable[[str], SubmittedRun]) -> None:
    run = started("sleep 3600 & echo ready >ready; wait")
    wait_until((run.layout.root / "ready").exists)
    os.kill(int(run.job_id), signal.SIGKILL)
    wait_until(lambda: process.start_time(int(run.job_id)) is None)
    assert observe(run).state is RunState.RUNNING
    assert cancel([run]) == {}
    assert observe(run).state is RunState.CANCELED


def test_canceling_lets_the_script_shut_down(started: Callable[[str], SubmittedRun]) -> None:
    run = started(POLITE)
    wait_until((run.layout.root / "ready").exists)
    assert cancel([run]) == {}
    assert observe(run).state is RunState.CANCELED
    assert "stopping" in run.layout.job_log.read_text()
    assert process.group_members(int(run.job_id)) == []


def test_a_script_that_ignores_sigterm_is_killed(
    started: Callable[[str], SubmittedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalScheduler, "grace_seconds", 0.1)
    run = started(STUBBORN)
    wait_until((run.layout.root / "ready").exists)
    assert cancel([run]) == {}
    assert observe(run).state is RunState.CANCELED


def test_an_ended_run_cannot_be_canceled(started: Callable[[str], SubmittedRun]) -> None:
    run = started("echo 5 >exit-code-$$")
    wait_until(lambda: observe(run).is_final)
    assert cancel([run])[run.id].state is RunState.FAILED
    assert not run.layout.canceled.exists()


def test_a_later_process_with_the_same_id_is_not_the_run(make_run: RunMaker) -> None:
    run = make_run(scheduler="local", job_id=str(os.getpid()))
    assert observe(run).state is RunState.FAILED


def test_the_state_of_a_run_on_another_machine_is_unknown(make_run: RunMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(scheduler="local")
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    seen = observe(run)
    assert (seen.state, seen.is_final) == (RunState.UNKNOWN, False)
    assert run.submission.host in seen.reason


def test_a_trainer_that_receives_no_signals_is_stopped_by_the_stop_file(make_run: RunMaker) -> None:
    run = make_run(scheduler="local", job_id="99999999")
    run.layout.leases.mkdir()
    inside = Holder("container", "another process namespace", 7, "1", "", 0.0)
    (run.layout.leases / "000001.json").write_text(json.dumps(asdict(inside)))
    assert cancel([run]) == {}
    assert run.layout.job_stop_request(run.job_id).exists()
