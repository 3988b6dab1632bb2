"""What every scheduler can do, and which ones there are."""

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
    """Takes a job script, says how the job is, and ends it."""

    poll_seconds: ClassVar[float]
    """How often it may be asked for states without being a burden."""

    def submit(self, layout: RunLayout, environment: Mapping[str, str], *, has_preparation: bool = False) -> Submission:
        """Submit the script of a run, with these variables for its job; first that of its preparation, if it has one.

        Raises:
            SubmitError: it was refused; there is no job.
            PrerequisiteError: the scheduler is not on this machine.
        """

    def observe(self, runs: Sequence[SubmittedRun]) -> dict[str, Observation]:
        """Ask for the states of all `runs` at once; a run id that is missing is one that it knows nothing of.

        Raises:
            FtkitError: it can't be asked.
        """

    def cancel(self, run: SubmittedRun) -> None:
        """End a job.

        Raises:
            FtkitError: it could not be ended.
        """


def scheduler_for(name: SchedulerName) -> Scheduler:
    """Return the scheduler of that name."""
    return SlurmScheduler() if name == "slurm" else LocalScheduler()
