"""The interface of schedulers, and its implementations by name."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import TYPE_CHECKING, ClassVar, Protocol

from ftkit import process
from ftkit.launch.slurm import SlurmScheduler
from ftkit.runs.job import Job, RunState, Submission, SubmittedRun
from ftkit.runs.lease import current_holder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftkit.planning.layout import RunLayout
    from ftkit.runs.job import SchedulerName


class Scheduler(Protocol):
    """Submits job scripts, reports the states of jobs, and cancels them."""

    poll_seconds: ClassVar[float]
    """Pause between two queries for states, long enough not to burden the scheduler."""

    def submit(self, layout: RunLayout, environment: Mapping[str, str], *, has_preparation: bool = False) -> Submission:
        """Submit the script of a run, with these variables for its job; first that of its preparation, if it has one.

        Raises:
            SubmitError: the scheduler refused the job.
            PrerequisiteError: the scheduler's programs are not on this machine.
        """

    def observe(self, runs: Sequence[SubmittedRun]) -> dict[str, Job]:
        """Return the states of all `runs` in one query; runs unknown to the scheduler are omitted.

        Raises:
            FtkitError: the scheduler does not answer.
        """

    def cancel(self, run: SubmittedRun) -> None:
        """End a job.

        Raises:
            FtkitError: the job could not be canceled.
        """


def scheduler_for(name: SchedulerName) -> Scheduler:
    """Return the scheduler of that name."""
    return SlurmScheduler() if name == "slurm" else LocalScheduler()


class LocalScheduler:
    """Starts the script immediately, in a new process group."""

    poll_seconds: ClassVar[float] = 1.0
    grace_seconds: ClassVar[float] = 10.0

    def submit(self, layout: RunLayout, environment: Mapping[str, str], *, has_preparation: bool = False) -> Submission:
        """Start the script."""
        if has_preparation:
            raise ValueError("on this machine, the run's own script prepares its data")
        pid = process.start_detached(
            ["bash", str(layout.script)], log=layout.job_log, cwd=layout.root, environment=environment
        )
        return Submission(
            scheduler="local",
            job_id=str(pid),
            submitted=time.time(),
            host=socket.gethostname(),
            process_start=process.start_time(pid) or "",
        )

    def observe(self, runs: Sequence[SubmittedRun]) -> dict[str, Job]:
        """Return the runs whose processes are alive; the final state of the others is in their files."""
        here = socket.gethostname()
        states = {}
        for run in runs:
            if run.submission.host != here:
                elsewhere = f"it was started on {run.submission.host}: check its state there"
                states[run.id] = Job(run.job_id, RunState.UNKNOWN, reason=elsewhere)
            elif _is_alive(run.submission):
                states[run.id] = Job(run.job_id, RunState.RUNNING, nodes=here, started=run.submission.submitted)
        return states

    def cancel(self, run: SubmittedRun) -> None:
        """Send SIGTERM to the script, then to its group, then SIGKILL."""
        pid = int(run.job_id)
        for ask in (_terminate_script, _terminate_group, _kill_group):
            ask(pid)
            if _wait_until_gone(run.submission, self.grace_seconds):
                break
        if current_holder(run.layout):  # perhaps in a container, where signals don't reach it
            run.layout.job_stop_request(run.job_id).touch()


def _is_alive(submission: Submission) -> bool:
    """Return whether the script, or another process of its group, is alive."""
    pid = int(submission.job_id)
    started = process.start_time(pid)
    if started is not None:
        return started == submission.process_start
    return bool(process.group_members(pid))


def _terminate_script(pid: int) -> None:
    """Signal only the script: the other processes of its group would die before it could request a checkpoint."""
    if process.start_time(pid) is None:
        _terminate_group(pid)
    else:
        os.kill(pid, signal.SIGTERM)


def _terminate_group(pid: int) -> None:
    process.signal_group(pid, signal.SIGTERM)


def _kill_group(pid: int) -> None:
    process.signal_group(pid, signal.SIGKILL)


def _wait_until_gone(submission: Submission, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while _is_alive(submission):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
