"""Jobs on a Slurm cluster, through its command-line programs.

Their JSON output is not used, because its structure differs between releases (22.05 to 26.05).
"""

from __future__ import annotations

import os
import re
import socket
import time
from typing import TYPE_CHECKING, ClassVar

from ftkit import process
from ftkit.errors import FtkitError, PrerequisiteError, SubmitError, one_line
from ftkit.runs.states import Observation, RunState
from ftkit.runs.submission import Submission, SubmittedRun

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from ftkit.planning.layout import RunLayout

_IDS_IN_A_QUERY = 400
_CLIENT_VARIABLES = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_CONF_SERVER"}
"""SLURM_* variables that configure the programs, rather than describe an enclosing job."""


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
            job_id, stderr = _sbatch([*after, *requeue, layout.script.name], layout, environment)
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

    def observe(self, runs: Sequence[SubmittedRun]) -> dict[str, Observation]:
        """Query squeue first: it lists a requeued job, while sacct may report it as ended."""
        states: dict[str, Observation] = {}
        for first in range(0, len(runs), _IDS_IN_A_QUERY):
            some = runs[first : first + _IDS_IN_A_QUERY]
            states |= _observe_by_squeue(some)
            rest = [run for run in some if run.id not in states]
            if rest:
                states |= _observe_by_sacct(rest)
        return states

    def cancel(self, run: SubmittedRun) -> None:
        """Cancel the job with scancel."""
        jobs = [run.submission.job_id]
        if run.submission.preparation_job_id:
            jobs.append(run.submission.preparation_job_id)  # scancel accepts jobs that have ended
        answer = _ask(["scancel", *jobs], os.environ)
        if answer.returncode != 0:
            raise SubmitError(
                f"scancel could not cancel job {run.submission.job_id}: {clean_stderr(answer.stderr)}",
                meaning="the job belongs to another user, or Slurm can't be reached",
                fix=f"check with: squeue -j {run.submission.job_id}",
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


def sbatch_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the SBATCH_* variables of the environment, which override the script's #SBATCH lines."""
    return sorted(f"{key}={value}" for key, value in environment.items() if key.startswith("SBATCH_") and value)


def _ask(args: list[str], environment: Mapping[str, str], *, cwd: Path | None = None) -> process.ProgramOutput:
    try:
        return process.run(args, cwd=cwd, environment=_environment(environment))
    except PrerequisiteError as error:
        raise PrerequisiteError(
            f"'{args[0]}' was not found: this machine can't talk to Slurm",
            meaning="this is not a login node of the cluster, or Slurm's programs are not on PATH",
            fix="log in to the cluster's login node, or run here with --cluster local",
        ) from error


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove variables of an enclosing job and of the user's output formats; have times printed as epoch seconds."""
    kept = {
        key: value
        for key, value in environment.items()
        if not key.startswith(("SLURM_", "SQUEUE_", "SACCT_")) or key in _CLIENT_VARIABLES
    }
    return kept | {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}


def _observe_by_squeue(runs: Sequence[SubmittedRun]) -> dict[str, Observation]:
    jobs = ",".join(run.submission.job_id for run in runs)
    answer = _ask(["squeue", "--noheader", "--states=all", f"--format={SQUEUE_FORMAT}", f"--jobs={jobs}"], os.environ)
    if answer.returncode != 0 and not re.search("invalid job id", answer.stderr, re.IGNORECASE):
        raise SubmitError(
            f"Slurm did not report job states: {clean_stderr(answer.stderr)}",
            meaning="its controller is busy, restarting, or not reachable from this machine",
            fix="try again in a minute; the runs themselves continue",
        )
    return read_squeue(answer.stdout, runs)


def _observe_by_sacct(runs: Sequence[SubmittedRun]) -> dict[str, Observation]:
    """Query sacct. It fails on clusters without accounting; then the runs' own files decide."""
    jobs = ",".join(run.submission.job_id for run in runs)
    try:
        answer = _ask(["sacct", "-P", "-X", "-n", f"--format={SACCT_FIELDS}", f"--jobs={jobs}"], os.environ)
    except (PrerequisiteError, process.ProgramTimeoutError):
        return {}
    return read_sacct(answer.stdout, runs) if answer.returncode == 0 else {}


# --- Output of squeue and sacct ---------------------------------------------------------------
# Both also print each job's folder: job ids start again at 1 when a cluster is reinstalled, and another cluster on the
# same file system has its own. A job in another folder than the run's is not the run's.

# The folder comes last, because only it may contain the separator.
SQUEUE_FORMAT = "%A|%T|%r|%S|%e|%N|%Z"
SACCT_FIELDS = "JobIDRaw,State,Start,End,NodeList,ExitCode,WorkDir"

_ACTIVE = {
    "COMPLETING": RunState.RUNNING,
    "CONFIGURING": RunState.PENDING,
    "EXPEDITING": RunState.PENDING,
    "PENDING": RunState.PENDING,
    "REQUEUED": RunState.PENDING,
    "REQUEUE_FED": RunState.PENDING,
    "REQUEUE_HOLD": RunState.PENDING,
    "RESIZING": RunState.RUNNING,
    "RESV_DEL_HOLD": RunState.PENDING,
    "RUNNING": RunState.RUNNING,
    "SIGNALING": RunState.RUNNING,
    "SPECIAL_EXIT": RunState.PENDING,
    "STAGE_OUT": RunState.RUNNING,
    "STOPPED": RunState.RUNNING,
    "SUSPENDED": RunState.RUNNING,
}
_FINAL = {
    "BOOT_FAIL": RunState.NODE_FAILURE,
    "CANCELLED": RunState.CANCELED,
    "COMPLETED": RunState.COMPLETED,
    "DEADLINE": RunState.TIMED_OUT,
    "FAILED": RunState.FAILED,
    "LAUNCH_FAILED": RunState.FAILED,
    "NODE_FAIL": RunState.NODE_FAILURE,
    "OUT_OF_MEMORY": RunState.OUT_OF_MEMORY,
    "PREEMPTED": RunState.PREEMPTED,
    "RECONFIG_FAIL": RunState.NODE_FAILURE,
    "REVOKED": RunState.CANCELED,
    "TIMEOUT": RunState.TIMED_OUT,
}
_REASONS = {
    "BeginTime": "its start is delayed; after a requeue Slurm waits about two minutes",
    "Dependency": "it waits for the job that prepares its data and weights",
    "DependencyNeverSatisfied": "the job that prepares its data and weights failed: it will never start",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "it is held; to release it: scontrol release JOB",
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions": (
        "its nodes are down or reserved"
    ),
    "PartitionDown": "the partition is down",
    "PartitionNodeLimit": "more nodes than the partition allows: it will never start",
    "PartitionTimeLimit": "a longer time limit than the partition allows: it will never start",
    "Priority": "other jobs are ahead of it",
    "ReqNodeNotAvail": "its nodes are down or reserved",
    "Resources": "it waits for free nodes",
}


def read_squeue(text: str, runs: Sequence[SubmittedRun]) -> dict[str, Observation]:
    """Parse squeue's output: the state of each run."""
    states = {}
    for run, (state, reason, start, end, nodes) in _rows(text, 7, runs):
        seen = _observation(state, reason, start, end, nodes)
        if seen:
            states[run.id] = seen
    return states


def read_sacct(text: str, runs: Sequence[SubmittedRun]) -> dict[str, Observation]:
    """Parse sacct's output: the final state of each run.

    A job that sacct lists as active but squeue does not list is lost. sacct's reason is not used: it is why the job was
    once pending.
    """
    states = {}
    for run, (state, start, end, nodes, exit_code) in _rows(text, 7, runs):
        seen = _observation(state, "", start, end, nodes, _exit_code(exit_code))
        if seen and seen.is_final:
            states[run.id] = seen
    return states


def _rows(text: str, num_fields: int, runs: Sequence[SubmittedRun]) -> Iterator[tuple[SubmittedRun, list[str]]]:
    by_job = {run.submission.job_id: run for run in runs}
    for line in text.splitlines():
        job_id, *values = line.split("|", num_fields - 1)
        run = by_job.get(job_id)
        if run and len(values) == num_fields - 1 and values.pop().rstrip("/").endswith(f"/{run.id}"):
            yield run, values


def _observation(
    state: str, reason: str, start: str, end: str, nodes: str, exit_code: int | None = None
) -> Observation | None:
    word = state.split(maxsplit=1)[0].rstrip("+") if state else ""  # "CANCELLED by 1000"
    known = _ACTIVE.get(word) or _FINAL.get(word)
    if known is None:
        return None
    is_final = word in _FINAL
    return Observation(
        state=known,
        is_final=is_final,
        reason=_explain(word, reason),
        exit_code=exit_code,
        nodes="" if nodes in ("None assigned", "(null)") else nodes,
        started=_time(start),
        ended=_time(end) if is_final else None,
    )


def _explain(word: str, reason: str) -> str:
    if word == "CONFIGURING":
        return "its nodes are starting"
    if word == "EXPEDITING":
        return "Slurm restarts it before all other jobs"
    if word in ("SUSPENDED", "STOPPED"):
        return "Slurm has suspended it"
    code = reason.strip("()").partition(", UnavailableNodes")[0]
    if code in ("", "None", "null", "NonZeroExitCode"):  # the state and the exit code say more
        return ""
    meaning = _REASONS.get(code)
    return f"{code}: {meaning}" if meaning else code


def _time(text: str) -> float | None:
    return float(text) if text.isdigit() else None


def _exit_code(text: str) -> int | None:
    """Convert Slurm's `code:signal` to the exit code that a shell reports."""
    code, _, signal_number = text.partition(":")
    if not code.isdigit():
        return None
    return 128 + int(signal_number) if signal_number.isdigit() and int(signal_number) else int(code)


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


class UncertainSubmitError(SubmitError):
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
