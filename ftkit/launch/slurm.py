"""Jobs on a Slurm cluster, by its command line programs.

Their JSON is not used: its shape differs from release to release (22.05 to 26.05).
"""

from __future__ import annotations

import os
import re
import socket
import time
from typing import TYPE_CHECKING, ClassVar

from ftkit import process
from ftkit.errors import PrerequisiteError, SubmitError
from ftkit.launch.slurm_answers import SACCT_FIELDS, SQUEUE_FORMAT, read_sacct, read_squeue
from ftkit.launch.slurm_refusals import explain_refusal, said
from ftkit.runs.submission import Submission, SubmittedRun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftkit.planning.layout import RunLayout
    from ftkit.runs.states import Observation

_IDS_IN_A_QUERY = 400
_NOT_ABOUT_A_JOB = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_CONF_SERVER"}


class SlurmScheduler:
    """Submits by sbatch; asks squeue for jobs that Slurm still holds, and sacct for the others."""

    poll_seconds: ClassVar[float] = 4.0

    def submit(self, layout: RunLayout) -> Submission:
        """Hand the script to sbatch, in the run's folder."""
        answer = _ask(["sbatch", "--parsable", layout.script.name], layout)
        lines = answer.stdout.split()
        job_id = lines[-1].partition(";")[0] if lines else ""
        if answer.returncode != 0 or not job_id.isdigit():
            raise explain_refusal(answer.stderr or answer.stdout)
        return Submission(
            scheduler="slurm",
            job_id=job_id,
            submitted=time.time(),
            host=socket.gethostname(),
            messages=said(answer.stderr),
        )

    def observe(self, runs: Sequence[SubmittedRun]) -> dict[str, Observation]:
        """Ask squeue first: a job that Slurm requeued after a failure is there, while sacct may call it ended."""
        states: dict[str, Observation] = {}
        for first in range(0, len(runs), _IDS_IN_A_QUERY):
            some = runs[first : first + _IDS_IN_A_QUERY]
            states |= _observe_by_squeue(some)
            rest = [run for run in some if run.id not in states]
            if rest:
                states |= _observe_by_sacct(rest)
        return states

    def cancel(self, run: SubmittedRun) -> None:
        """Let scancel end the job."""
        answer = _ask(["scancel", run.submission.job_id])
        if answer.returncode != 0:
            raise SubmitError(
                f"scancel could not end job {run.submission.job_id}: {said(answer.stderr)}",
                meaning="the job is somebody else's, or Slurm can't be reached",
                fix=f"check with: squeue -j {run.submission.job_id}",
            )


def overriding_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the SBATCH_* variables of a shell: for sbatch they win over what the script says."""
    return sorted(f"{key}={value}" for key, value in environment.items() if key.startswith("SBATCH_") and value)


def _ask(args: list[str], layout: RunLayout | None = None) -> process.ProgramOutput:
    try:
        return process.run(args, cwd=layout.root if layout else None, environment=_environment(os.environ))
    except PrerequisiteError as error:
        raise PrerequisiteError(
            f"'{args[0]}' was not found: this machine can't talk to Slurm",
            meaning="this is not a login node of the cluster, or Slurm's programs are not on PATH",
            fix="log in to the cluster's login node, or run here with --cluster local",
        ) from error


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out what a job around us, or a user's taste for formats, would change; print times as epoch seconds."""
    kept = {
        key: value
        for key, value in environment.items()
        if not key.startswith(("SLURM_", "SQUEUE_", "SACCT_")) or key in _NOT_ABOUT_A_JOB
    }
    return kept | {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}


def _observe_by_squeue(runs: Sequence[SubmittedRun]) -> dict[str, Observation]:
    jobs = ",".join(run.submission.job_id for run in runs)
    answer = _ask(["squeue", "--noheader", "--states=all", f"--format={SQUEUE_FORMAT}", f"--jobs={jobs}"])
    if answer.returncode != 0 and not re.search("invalid job id", answer.stderr, re.IGNORECASE):
        raise SubmitError(
            f"Slurm can't be asked for states: {said(answer.stderr)}",
            meaning="its controller is busy, restarting, or not reachable from this machine",
            fix="try again in a minute; the runs themselves go on",
        )
    return read_squeue(answer.stdout, runs)


def _observe_by_sacct(runs: Sequence[SubmittedRun]) -> dict[str, Observation]:
    """Ask the accounting. Clusters without one refuse; then the runs' own files must tell."""
    jobs = ",".join(run.submission.job_id for run in runs)
    try:
        answer = _ask(["sacct", "-P", "-X", "-n", f"--format={SACCT_FIELDS}", f"--jobs={jobs}"])
    except (PrerequisiteError, process.ProgramTimeoutError):
        return {}
    return read_sacct(answer.stdout, runs) if answer.returncode == 0 else {}
