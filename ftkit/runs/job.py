"""The job of a run: its submission (submission.json), id and state, and the reason why it waits or ended."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from ftkit.files import read_json
from ftkit.planning.layout import RunLayout
from ftkit.runs.records import Seconds

SchedulerName = Literal["local", "slurm"]
JobId = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,17}(_(0|[1-9][0-9]{0,17}))?$")]
"""The id of a Slurm job or of a process, passed to programs: a decimal number; for a task of a job array, `ARRAY_TASK`.
A task's own job number is not used: for one task, it equals the array's id, which refers to all tasks."""


def own_job_id() -> str:
    """Return the id of the Slurm job of this process; empty without one."""
    job_id, task = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{os.environ.get('SLURM_ARRAY_JOB_ID', job_id)}_{task}" if task else job_id


class RunState(StrEnum):
    """State of a run, for users and scripts. Slurm's own states are in capitals (CANCELLED)."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    STOPPED = "stopped"
    NODE_FAILURE = "node-failure"
    TIMED_OUT = "timed-out"
    OUT_OF_MEMORY = "out-of-memory"
    PREEMPTED = "preempted"
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    UNKNOWN = "unknown"


FAILURES = frozenset(
    {RunState.FAILED, RunState.NODE_FAILURE, RunState.TIMED_OUT, RunState.OUT_OF_MEMORY, RunState.PREEMPTED}
)
"""States of runs that failed, rather than ended at the user's request."""


class Cause(StrEnum):
    """Why a start ended. The manifest, the job script's note and `--json` use these values."""

    CANCELED = "canceled"
    DISK_FULL = "disk-full"
    ERROR = "error"
    KILLED = "killed"
    LOST_PEERS = "lost-peers"
    MORE_STEPS = "more-steps"
    NODE_FAILURE = "node-failure"
    OUT_OF_MEMORY = "out-of-memory"
    PREEMPTED = "preempted"
    REBOOT = "reboot"
    REQUEUED = "requeued"
    STOP_REQUEST = "stop-request"
    TIME_LIMIT = "time-limit"
    UNKNOWN = "unknown"

    @property
    def words(self) -> str:
        return self.value.replace("-", " ")


STATES = {
    Cause.CANCELED: RunState.CANCELED,
    Cause.NODE_FAILURE: RunState.NODE_FAILURE,
    Cause.OUT_OF_MEMORY: RunState.OUT_OF_MEMORY,
    Cause.PREEMPTED: RunState.PREEMPTED,
    Cause.TIME_LIMIT: RunState.TIMED_OUT,
}
"""State of a run by the cause of its last end, if it did not start again."""

CAUSES = {state: cause for cause, state in STATES.items()}  # cause of a run's last end, if only the scheduler knows it


@dataclass(frozen=True)
class Job:
    """A run's job according to its scheduler, or to the run's files. Times are seconds since the epoch."""

    id: JobId | None  # None if the run was never submitted, or its submission is unreadable
    state: RunState
    is_final: bool = False  # the job has ended and will not continue by itself
    reason: str = ""  # why it waits or failed, from the scheduler or ftkit
    exit_code: int | None = None  # of the job script
    nodes: str = ""  # as the scheduler writes them
    started: Seconds | None = None  # or is expected to
    ended: Seconds | None = None
    cause: Cause | None = None  # why it ended, if known and not evident from the state

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else str(self.state)


@dataclass(frozen=True)
class Submission:
    scheduler: SchedulerName
    job_id: JobId
    submitted: Seconds  # since the epoch
    host: str  # where it was submitted; for `local`, where it runs
    process_start: str = ""  # distinguishes the process from a later one with the same id (`ftkit.process.start_time`)
    messages: str = ""  # the scheduler's output at submission
    earlier_job_ids: tuple[JobId, ...] = ()
    preparation_job_id: JobId | None = None  # prepares data and weights; this job waits for it
    after_job_id: JobId | None = None  # an earlier job array of the sweep, which must end first
    superseded: Seconds | None = None  # perhaps, since then: the scheduler gave no clear answer to a later submission

    def of_task(self, number: str) -> Submission:
        """Return the submission of one task of these job arrays."""
        preparation = self.preparation_job_id and f"{self.preparation_job_id}_{number}"
        return replace(self, job_id=f"{self.job_id}_{number}", preparation_job_id=preparation)


@dataclass(frozen=True)
class SubmittedRun:
    layout: RunLayout
    submission: Submission

    @property
    def id(self) -> str:
        return self.layout.root.name

    @property
    def job_id(self) -> JobId:
        return self.submission.job_id

    @property
    def job_number(self) -> JobId:
        """The id of the job; for a task, the id of its job array."""
        return self.job_id.partition("_")[0]


def read_submission(layout: RunLayout) -> Submission | None:
    """Read a run's newest submission; None if it was never submitted. Raises `DamagedFileError` if unreadable."""
    return read_json(layout.submission, Submission)


def read_submitted(layout: RunLayout) -> SubmittedRun | None:
    """Return a run with its newest submission. Errors as in `read_submission`."""
    submission = read_submission(layout)
    return SubmittedRun(layout, submission) if submission else None
