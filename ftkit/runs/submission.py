"""submission.json: the scheduler and the id of a run's job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ftkit.files import read_json, write_json
from ftkit.planning.layout import RunLayout
from ftkit.runs.records import Seconds

SchedulerName = Literal["local", "slurm"]
JobId = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,17}$")]
"""A decimal number: the id of a Slurm job or of a process, which is passed to programs."""


@dataclass(frozen=True)
class Submission:
    """One submission of a run's script.

    Args:
        scheduler: the scheduler of the job.
        job_id: Slurm's job id, or a process id.
        submitted: when, in seconds since the epoch.
        host: the machine that it was submitted on; for `local`, the one that it runs on.
        process_start: distinguishes the process from a later one with the same id (`ftkit.process.start_time`).
        messages: the scheduler's output at submission.
        earlier_job_ids: earlier jobs of this run.
        preparation_job_id: the job that prepares data and weights, which this one waits for.
    """

    scheduler: SchedulerName
    job_id: JobId
    submitted: Seconds
    host: str
    process_start: str = ""
    messages: str = ""
    earlier_job_ids: tuple[JobId, ...] = ()
    preparation_job_id: JobId | None = None


@dataclass(frozen=True)
class SubmittedRun:
    """A run's folder and its newest submission."""

    layout: RunLayout
    submission: Submission

    @property
    def id(self) -> str:
        """The run's id, which is the name of its folder."""
        return self.layout.root.name


def write_submission(layout: RunLayout, submission: Submission) -> None:
    """Record a run's submission."""
    write_json(layout.submission, submission)


def read_submission(layout: RunLayout) -> Submission | None:
    """Read a run's newest submission; None if it never was submitted.

    Raises:
        DamagedFileError: the file can't be read.
    """
    return read_json(layout.submission, Submission)
