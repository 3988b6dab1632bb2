"""Jobs on a Slurm cluster, through its command-line programs.

Their JSON output is not used, because its structure differs between releases (22.05 to 26.05).
"""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from ftkit import process
from ftkit.errors import FtkitError, NoAnswerError, PrerequisiteError, SubmitError, one_line
from ftkit.launch.slurm_states import SACCT_FIELDS, SQUEUE_FORMAT, read_sacct, read_squeue
from ftkit.runs.job import Submission, SubmittedRun
from ftkit.runs.lease import current_holder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ftkit.planning.layout import RunLayout
    from ftkit.runs.job import Job

_IDS_IN_A_QUERY = 400


class SlurmScheduler:
    """Submits with sbatch; queries squeue for pending and running jobs, and sacct for the others."""

    poll_seconds: ClassVar[float] = 4.0

    def submit(self, layout: RunLayout, environment: Mapping[str, str], *, has_preparation: bool = False) -> Submission:
        """Submit the script with sbatch in the run's folder, after the preparation job if there is one."""
        preparation_job_id = None
        after = []
        if has_preparation:
            preparation_job_id, _ = _sbatch([layout.preparation_script.name], layout, environment)
            after = [f"--dependency=afterok:{preparation_job_id}", "--kill-on-invalid-dep=yes"]
        requeue = ["--requeue=expedite"] if _expedites_requeues(environment) else []
        try:
            job_id, stderr = _sbatch_or_find([*after, *requeue, layout.script.name], layout, environment)
        except BaseException:
            if preparation_job_id:
                _ask(["scancel", preparation_job_id], environment)
            raise
        return Submission(
            scheduler="slurm",
            job_id=job_id,
            submitted=time.time(),
            host=socket.gethostname(),
            messages=clean_stderr(stderr),
            preparation_job_id=preparation_job_id,
        )

    def observe(self, runs: Sequence[SubmittedRun]) -> dict[str, Job]:
        """Query squeue first: it lists a requeued job, while sacct may report it as ended."""
        states: dict[str, Job] = {}
        for first in range(0, len(runs), _IDS_IN_A_QUERY):
            some = runs[first : first + _IDS_IN_A_QUERY]
            states |= _observe_by_squeue(some)
            rest = [run for run in some if run.id not in states]
            if rest:
                states |= _observe_by_sacct(rest)
        return states

    def cancel(self, run: SubmittedRun) -> None:
        """Cancel its jobs with scancel, which accepts those that have ended; also one that was submitted by hand."""
        holder = current_holder(run.layout)
        job_ids = (run.job_id, run.submission.preparation_job_id, holder.job_id if holder else None)
        jobs = dict.fromkeys(job_id for job_id in job_ids if job_id)
        answer = _ask(["scancel", *jobs], os.environ)
        if answer.returncode != 0:
            raise SubmitError(
                f"scancel could not cancel job {run.job_id}: {clean_stderr(answer.stderr)}",
                meaning="the job belongs to another user, or Slurm can't be reached",
                fix=f"check with: squeue -j {run.job_id}",
            )


def _sbatch_or_find(args: list[str], layout: RunLayout, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the job id, and sbatch's other output. If Slurm's answer is lost, look for the job."""
    try:
        return _sbatch(args, layout, environment)
    except (UncertainSubmitError, process.ProgramTimeoutError) as error:
        job_id = None
        with suppress(FtkitError):
            job_id = find_job(layout, environment)
        if job_id is None:
            raise
        return job_id, f"{error.what}; but Slurm has accepted the job"


def find_job(layout: RunLayout, environment: Mapping[str, str]) -> str | None:
    """Return this user's pending or running job of a run's script; None if there is none.

    Raises:
        FtkitError: Slurm did not respond.
    """
    states = "--states=CONFIGURING,PENDING,RUNNING,SUSPENDED"
    words = ["squeue", "--noheader", states, f"--user={os.getuid()}", "--format=%A|%o"]
    answer = _ask(words, environment)
    if answer.returncode != 0:
        raise _no_states(answer.stderr)
    jobs = [line.partition("|")[::2] for line in answer.stdout.splitlines()]
    suffix = f"/{layout.root.name}/{layout.script.name}"
    return max(
        (job for job, script in jobs if job.isdigit() and script.strip().endswith(suffix)), key=int, default=None
    )


def submit_script(layout: RunLayout, name: str, environment: Mapping[str, str]) -> str:
    """Submit another script of a run's folder; return the job's id.

    Raises:
        SubmitError: Slurm refused it, or gave no clear answer.
    """
    return _sbatch([name], layout, environment)[0]


def _sbatch(args: list[str], layout: RunLayout, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the job id, and sbatch's other output."""
    answer = _ask(["sbatch", "--parsable", *args], environment, cwd=layout.root)
    lines = answer.stdout.split()
    job_id = lines[-1].partition(";")[0] if lines else ""
    if answer.returncode != 0:
        raise explain_refusal(answer.stderr or answer.stdout)
    if not job_id.isdigit():
        said = one_line(f"{answer.stdout} {clean_stderr(answer.stderr)}".strip() or "nothing")
        raise UncertainSubmitError(
            f"sbatch succeeded, but printed no job id: {said}", meaning="a wrapper of the site changes its output"
        )
    return job_id, answer.stderr


def _expedites_requeues(environment: Mapping[str, str]) -> bool:
    """Return whether Slurm restarts jobs that lose a node before all others: from Slurm 25.11 on, if enabled."""
    try:
        configuration = _ask(["scontrol", "show", "config"], environment).stdout
    except FtkitError:  # sbatch has the last word
        return False
    return re.search(r"^SlurmctldParameters *=.*\benable_expedited_requeue\b", configuration, re.MULTILINE) is not None


def warn_of_variables(environment: Mapping[str, str]) -> list[str]:
    """Return warnings about SBATCH_* variables: they override the script's #SBATCH lines, or are ignored."""
    warnings = []
    for key, value in sorted(environment.items()):
        if not key.startswith("SBATCH_") or not value:
            continue
        effect = "overrides the job script"
        if key in process.IGNORED_SBATCH_VARIABLES:
            effect = "is ignored: ftkit sets this itself"
        elif key == "SBATCH_EXPORT" and "ALL" not in value.split(","):
            effect += ": the job gets no other variables of this shell or of .env, such as HF_TOKEN"
        warnings.append(f"{key}={value} in your environment {effect}")
    return warnings


def _ask(args: list[str], environment: Mapping[str, str], *, cwd: Path | None = None) -> process.ProgramOutput:
    try:
        return process.run(args, cwd=cwd, environment=process.slurm_environment(environment))
    except PrerequisiteError as error:
        raise PrerequisiteError(
            f"'{args[0]}' was not found: this machine can't talk to Slurm",
            meaning="this is not a login node of the cluster, or Slurm's programs are not on PATH",
            fix="log in to the cluster's login node, or run here with --cluster local",
        ) from error


def _observe_by_squeue(runs: Sequence[SubmittedRun]) -> dict[str, Job]:
    jobs = ",".join(run.job_id for run in runs)
    answer = _ask(["squeue", "--noheader", "--states=all", f"--format={SQUEUE_FORMAT}", f"--jobs={jobs}"], os.environ)
    if answer.returncode != 0 and not re.search("invalid job id", answer.stderr, re.IGNORECASE):
        raise _no_states(answer.stderr)
    return read_squeue(answer.stdout, runs)


def _no_states(stderr: str) -> NoAnswerError:
    return NoAnswerError(
        f"Slurm did not report job states: {clean_stderr(stderr)}",
        meaning="its controller is busy, restarting, or not reachable from this machine",
        fix="try again in a minute; the runs themselves continue",
    )


def _observe_by_sacct(runs: Sequence[SubmittedRun]) -> dict[str, Job]:
    """Query sacct. It fails on clusters without accounting; then the runs' own files decide."""
    jobs = ",".join(run.job_id for run in runs)
    try:
        answer = _ask(["sacct", "-P", "-X", "-n", f"--format={SACCT_FIELDS}", f"--jobs={jobs}"], os.environ)
    except (PrerequisiteError, process.ProgramTimeoutError):
        return {}
    return read_sacct(answer.stdout, runs) if answer.returncode == 0 else {}


# --- Why sbatch refuses a job -------------------------------------------------------------------

_REFUSALS: tuple[tuple[str, str, str], ...] = (
    (
        "accounting/qos policy|submit.*limit|maxsubmit",
        "a limit of your account or its quality of service is reached: jobs, nodes, GPUs or hours",
        "wait until other jobs end, or ask the cluster's administrators",
    ),
    (
        "invalid partition",
        "the cluster has no partition of that name",
        "list them with 'sinfo -s' and set 'partition:' in the cluster's profile",
    ),
    (
        "partition not available",
        "the partition is closed, or takes no new jobs at present",
        "see 'sinfo -s'; try again later, or set 'partition:' in the cluster's profile",
    ),
    (
        "invalid account",
        "the account is unknown, is not yours, or may not use this partition",
        "list yours with 'sacctmgr show associations user=$USER' and set 'account:' in the cluster's profile",
    ),
    (
        "invalid qos",
        "the quality of service is unknown, or not allowed for your account or partition",
        "set 'qos:' in the cluster's profile",
    ),
    (
        "reservation",
        "the reservation has ended, has not begun, or does not include you",
        "see 'scontrol show reservation' and set 'reservation:' in the cluster's profile",
    ),
    (
        "time limit",
        "the time limit is longer than the partition allows",
        "see 'sinfo -o \"%P %l\"' and set resources.time_limit",
    ),
    (
        "generic resource|gres",
        "the cluster's GPUs have other GRES names than the profile requests",
        "see 'sinfo -o \"%N %G\"' and set 'gpu_request:' in the cluster's profile (gres, gpus-per-node or none)",
    ),
    (
        "node configuration is not available",
        "no node has the GPUs, CPUs or memory that the job needs per node",
        "see 'sinfo -o \"%N %c %m %G\"'; set 'gpus_per_node:' and 'cpus_per_node:' in the cluster's profile",
    ),
    (
        "node count|partition configuration|more processors",
        "more nodes than the partition has or allows",
        "see 'sinfo -s' and use fewer --nodes",
    ),
    (
        "group not permitted|access.*denied|permission denied",
        "you may not use this partition or account",
        "ask the cluster's administrators",
    ),
    (
        "unrecognized option|invalid option",
        "this Slurm does not know an option that the job script uses",
        "print the script with --dry-run; remove the option from the cluster's profile",
    ),
)

_NO_ANSWER = (
    "contact slurm controller|timed out|connection refused|unable to connect|zero bytes were|not connected|"
    "message (?:send|receive) failure|socket error|connection reset|broken pipe"
)
"""Messages after which a job may exist: Slurm's protocol failed, or its answer was lost."""


class UncertainSubmitError(NoAnswerError):
    """Slurm's answer is unclear: the job may have been submitted."""


class InterruptedSubmitError(UncertainSubmitError):
    """The user interrupted sbatch."""

    exit_code = 130


def explain_refusal(stderr: str) -> SubmitError:
    """Convert sbatch's message to an error with its usual meaning."""
    message = clean_stderr(stderr) or "sbatch printed no error"
    if re.search(_NO_ANSWER, message, re.IGNORECASE):
        return UncertainSubmitError(
            f"Slurm did not answer: {message}", meaning="its controller is down, restarting or overloaded"
        )
    for pattern, meaning, fix in _REFUSALS:
        if re.search(pattern, message, re.IGNORECASE):
            return SubmitError(f"Slurm refused the job: {message}", meaning=meaning, fix=fix)
    return SubmitError(f"Slurm refused the job: {message}", fix="print the script with --dry-run")


def clean_stderr(stderr: str) -> str:
    """Return the output of a Slurm program without the `program:` prefix of each line."""
    lines = [re.sub(r"^\w+: (error: |fatal: |lua: )?", "", line).strip() for line in stderr.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))
