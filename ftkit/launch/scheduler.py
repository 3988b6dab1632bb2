"""Schedulers submit job scripts, report the states of jobs, and cancel them."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from ftkit import process
from ftkit.errors import FtkitError, NoAnswerError, SubmitError, one_line
from ftkit.launch import slurm
from ftkit.launch.slurm import clean_stderr, find_job
from ftkit.runs.job import Job, RunState, SchedulerName, Submission, SubmittedRun
from ftkit.runs.lease import current_holder

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout


def scheduler_for(name: SchedulerName) -> LocalScheduler | SlurmScheduler:
    return SlurmScheduler() if name == "slurm" else LocalScheduler()


class LocalScheduler:
    """Starts the script immediately, in a new process group."""

    poll_seconds: ClassVar[float] = 1.0
    grace_seconds: ClassVar[float] = 10.0

    def submit(self, layout: RunLayout, environment: Mapping[str, str], **_: object) -> Submission:
        """Start the script of a run with these variables. It prepares its own data, and local runs are sequential."""
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
        """Return the jobs of runs that are alive here or may be on other hosts; files have the others' final state."""
        here = socket.gethostname()
        states = {}
        for run in runs:
            has_ended = run.layout.job_exit_code(run.job_id).exists()
            if run.submission.host != here and not has_ended:
                elsewhere = f"it was started on {run.submission.host}: check its state there"
                states[run.id] = Job(run.job_id, RunState.UNKNOWN, reason=elsewhere)
            elif run.submission.host == here and _is_alive(run.submission):
                states[run.id] = Job(run.job_id, RunState.RUNNING, nodes=here, started=run.submission.submitted)
        return states

    def cancel(self, runs: Sequence[SubmittedRun]) -> None:
        """Send SIGTERM to each script, then to its process group, then SIGKILL.

        Raises `SubmitError` for a run of another machine, before any signal.
        """
        for run in runs:
            if (host := run.submission.host) != socket.gethostname():
                raise SubmitError(
                    f"{run.id} was started on {host}, and its processes can't be signaled from here",
                    fix=f"there: ftkit cancel {run.id}; if it no longer runs there: ftkit resume {run.id}",
                )
        for run in runs:
            pid = int(run.job_id)
            # Signal only the script first: its other processes would die before it could request a checkpoint.
            if process.start_time(pid) == run.submission.process_start:
                with suppress(ProcessLookupError):  # it just ended
                    os.kill(pid, signal.SIGTERM)
            elif _is_alive(run.submission):
                process.signal_group(pid, signal.SIGTERM)
            for following in (signal.SIGTERM, signal.SIGKILL, None):
                if _wait_until_gone(run.submission, self.grace_seconds) or following is None:
                    break
                process.signal_group(pid, following)
            if current_holder(run.layout):  # perhaps in a container, where signals don't reach it
                run.layout.job_stop_request(run.job_id).touch()


def _is_alive(submission: Submission) -> bool:
    pid = int(submission.job_id)
    started = process.start_time(pid)
    return bool(process.group_members(pid)) if started is None else started == submission.process_start


def _wait_until_gone(submission: Submission, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while _is_alive(submission):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# --- Slurm -----------------------------------------------------------------------------------------


class SlurmScheduler:
    """Submits with sbatch; queries squeue for pending and running jobs, and sacct for the others."""

    poll_seconds: ClassVar[float] = 10.0

    def submit(
        self, layout: RunLayout, environment: Mapping[str, str], *, has_preparation: bool = False,
        tasks: str = "", after: SubmittedRun | None = None,
    ) -> Submission:  # fmt: skip
        """Submit the script with sbatch in the run's folder, after the preparation job, if any, and after `after`.

        With `tasks` (as for `--array`: `1-12%4`), the jobs are arrays for a sweep whose first run is this one; each
        task starts after its preparation task. The returned ids are those of the arrays.

        Raises `SubmitError` if Slurm refused the job; `UncertainSubmitError` if the job may exist; `PrerequisiteError`
        if Slurm's programs are not on this machine.
        """
        script, preparation_script, condition = layout.script, layout.preparation_script, "afterok"
        array = [f"--array={tasks}"] if tasks else []
        if tasks:
            script, preparation_script, condition = layout.array_script, layout.preparation_array, "aftercorr"
        preparation_job_id = None
        others = [f"afterany:{after.job_number}"] if after else []
        if has_preparation:
            preparation_job_id, _ = sbatch([*array, preparation_script.name], layout, environment)
            others.append(f"{condition}:{preparation_job_id}")
        waits = [f"--dependency={','.join(others)}", "--kill-on-invalid-dep=yes"] if others else []
        requeue = ["--requeue=expedite"] if _expedites_requeues(environment) else []
        try:
            job_id, stderr = _sbatch_or_find([*array, *waits, *requeue, script.name], layout, environment)
        except BaseException:
            if preparation_job_id:
                slurm.ask(["scancel", preparation_job_id], environment)
            raise
        return Submission(
            scheduler="slurm",
            job_id=job_id,
            submitted=time.time(),
            host=socket.gethostname(),
            messages=clean_stderr(stderr),
            preparation_job_id=preparation_job_id,
            after_job_id=after.job_number if after else None,
        )

    observe = staticmethod(slurm.observe)

    def cancel(self, runs: Sequence[SubmittedRun]) -> None:
        """Cancel the jobs of runs, also those submitted by hand, with scancel, which accepts ended jobs too."""
        tasks: dict[str, list[str]] = {}  # by job: scancel sends one request per argument, and sites limit the rate
        for run in runs:
            holder = current_holder(run.layout)
            # The job number alone would cancel the whole array.
            other = holder.job_id if holder and holder.job_id != run.job_number else None
            for job_id in filter(None, dict.fromkeys((run.job_id, run.submission.preparation_job_id, other))):
                number, _, task = job_id.partition("_")
                tasks.setdefault(number, []).append(task)
        words = [f"{number}_[{','.join(own)}]" if all(own) else number for number, own in tasks.items()]
        answer = slurm.ask(["scancel", *words], os.environ)
        if answer.returncode != 0:
            raise SubmitError(
                f"scancel could not cancel {' '.join(words)}: {clean_stderr(answer.stderr)}",
                meaning="a job belongs to another user, or Slurm can't be reached",
                fix=f"check with: squeue -j {','.join(tasks)}",
            )


def _sbatch_or_find(args: list[str], layout: RunLayout, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the job id, and sbatch's other output. If Slurm's answer is lost, look for the job."""
    try:
        return sbatch(args, layout, environment)
    except NoAnswerError as error:
        job_id = None
        with suppress(FtkitError):
            job_id = find_job(layout, environment)
        if job_id is None:
            raise
        return job_id.partition("_")[0], f"{error.what}; but Slurm has accepted the job"


def sbatch(args: list[str], layout: RunLayout, environment: Mapping[str, str]) -> tuple[str, str]:
    """Submit a script of a run's folder; return the job's id, and sbatch's other output. Raises `SubmitError`."""
    answer = slurm.ask(["sbatch", "--parsable", *args], environment, cwd=layout.root)
    lines = answer.stdout.split()
    job_id = lines[-1].partition(";")[0] if lines else ""
    if answer.returncode != 0:
        raise explain_refusal(answer.stderr or answer.stdout)
    if not job_id.isdigit():
        what = f"{answer.stdout} {clean_stderr(answer.stderr)}".strip() or "nothing"
        what = f"sbatch succeeded, but printed no job id: {one_line(what)}"
        raise UncertainSubmitError(what, meaning="a wrapper of the site changes its output")
    return job_id, answer.stderr


def _expedites_requeues(environment: Mapping[str, str]) -> bool:
    """Return whether Slurm requeues jobs that lose a node ahead of all others (Slurm 25.11 or newer, if enabled)."""
    try:
        configuration = slurm.ask(["scontrol", "show", "config"], environment).stdout
    except FtkitError:  # sbatch itself will report problems
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


# --- Explain why sbatch refuses a job ------------------------------------------------------------

_REFUSALS = {
    "accounting/qos policy|submit.*limit|maxsubmit":
        ("a limit of your account or its quality of service is reached: jobs, nodes, GPUs or hours",
         "wait until other jobs end; give a sweep fewer values, or '--prepare here', which halves its number of jobs"),
    "invalid job array":
        ("the cluster takes no job arrays, or only shorter ones than the sweep",
         "see 'scontrol show config | grep MaxArraySize', and give fewer values"),
    "invalid partition|partition not available":
        ("the cluster has no partition of that name, or it takes no jobs at present",
         "list them with 'sinfo -s' and set 'partition:' in the cluster's profile"),
    "invalid account":
        ("the account is unknown, is not yours, or may not use this partition",
         "list yours with 'sacctmgr show associations user=$USER' and set 'account:' in the cluster's profile"),
    "invalid qos":
        ("the quality of service is unknown, or not allowed for your account or partition",
         "set 'qos:' in the cluster's profile"),
    "reservation":
        ("the reservation has ended, has not begun, or does not include you",
         "see 'scontrol show reservation' and set 'reservation:' in the cluster's profile"),
    "time limit":
        ("the time limit is longer than the partition allows",
         "see 'sinfo -o \"%P %l\"' and set resources.time_limit"),
    "generic resource|gres":
        ("the cluster's GPUs have other GRES names than the profile requests",
         "see 'sinfo -o \"%N %G\"' and set 'gpu_request:' in the cluster's profile (gres, gpus-per-node or none)"),
    "node configuration is not available":
        ("no node has the GPUs, CPUs or memory that the job needs per node",
         "see 'sinfo -o \"%N %c %m %G\"'; set 'gpus_per_node:' and 'cpus_per_node:' in the cluster's profile"),
    "node count|partition configuration|more processors":
        ("more nodes than the partition has or allows",
         "see 'sinfo -s' and use fewer --nodes"),
    "group not permitted|access.*denied|permission denied":
        ("you may not use this partition or account",
         "ask the cluster's administrators"),
    "unrecognized option|invalid option":
        ("this Slurm does not know an option that the job script uses",
         "print the script with --dry-run; remove the option from the cluster's profile"),
}  # fmt: skip
"""Parts of sbatch's messages, with the usual meaning and the fix."""


class UncertainSubmitError(NoAnswerError):
    """Slurm's answer is unclear: the job may have been submitted."""


class InterruptedSubmitError(UncertainSubmitError, exit_code=130):
    """The user interrupted sbatch."""


def explain_refusal(stderr: str) -> SubmitError:
    """Convert sbatch's message to an error with its usual meaning."""
    message = clean_stderr(stderr) or "sbatch printed no error"
    if re.search(process.SLURM_NO_ANSWER, message, re.IGNORECASE):
        meaning = "its controller is down, restarting or overloaded"
        return UncertainSubmitError(f"Slurm did not answer: {message}", meaning=meaning)
    for pattern, (meaning, fix) in _REFUSALS.items():
        if re.search(pattern, message, re.IGNORECASE):
            return SubmitError(f"Slurm refused the job: {message}", meaning=meaning, fix=fix)
    return SubmitError(f"Slurm refused the job: {message}", fix="print the script with --dry-run")
