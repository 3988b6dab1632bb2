"""The interface of schedulers, and its implementations by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

from ftkit.launch.local import LocalScheduler
from ftkit.launch.slurm import SlurmScheduler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftkit.planning.layout import RunLayout
    from ftkit.runs.states import Observation
    from ftkit.runs.submission import SchedulerName, Submission, SubmittedRun


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

    def observe(self, runs: Sequence[SubmittedRun]) -> dict[str, Observation]:
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
