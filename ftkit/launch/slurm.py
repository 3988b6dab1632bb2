"""Call Slurm's command-line programs, and parse the states of jobs from squeue and sacct.

Their JSON output is not used, because its structure differs between releases (22.05 to 26.05).
Each job's folder is queried too: job ids restart at 1 when a cluster is reinstalled, and another cluster on the same
file system has its own ids. A job whose folder is not the run's does not belong to the run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit import process
from ftkit.errors import NoAnswerError, PrerequisiteError, one_line
from ftkit.runs.job import Job, JobId, RunState, Submission, SubmittedRun

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout

_IDS_IN_A_QUERY = 400


def ask(args: list[str], environment: Mapping[str, str], *, cwd: Path | None = None) -> process.ProgramOutput:
    """Run a Slurm program; PrerequisiteError if it is not installed, ProgramTimeoutError if it does not respond."""
    try:
        return process.run(args, cwd=cwd, environment=process.slurm_environment(environment))
    except PrerequisiteError as error:
        raise PrerequisiteError(
            f"'{args[0]}' was not found: this machine can't talk to Slurm",
            meaning="this is not a login node of the cluster, or Slurm's programs are not on PATH",
            fix="log in to the cluster's login node, or run here with --cluster local",
        ) from error


def clean_stderr(stderr: str) -> str:
    """Return the output of a Slurm program without the `program:` prefix of each line."""
    lines = [re.sub(r"^\w+: (error: |fatal: |lua: )?", "", line).strip() for line in stderr.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))


def observe(runs: Sequence[SubmittedRun]) -> dict[str, Job]:
    """Return the states of runs. squeue is queried first, because sacct may report a requeued job as ended.

    Tasks of a job array are queried together, by the array's id. sacct fails on clusters without accounting; the runs'
    own files then decide. Raises `NoAnswerError` if squeue does not respond.
    """
    states: dict[str, Job] = {}
    numbers = list(dict.fromkeys(run.job_number for run in runs))
    for first in range(0, len(numbers), _IDS_IN_A_QUERY):
        asked = numbers[first : first + _IDS_IN_A_QUERY]
        some = [run for run in runs if run.job_number in asked]
        squeue = _ask_squeue(["--states=all", f"--format={_SQUEUE_FORMAT}", f"--jobs={','.join(asked)}"], os.environ)
        states |= read_squeue(squeue, some)
        if rest := [run for run in some if run.id not in states]:
            jobs = ",".join(dict.fromkeys(run.job_number for run in rest))
            with suppress(PrerequisiteError, process.ProgramTimeoutError):
                answer = ask(["sacct", "-P", "-X", "-n", f"--format={_SACCT_FIELDS}", f"--jobs={jobs}"], os.environ)
                states |= read_sacct(answer.stdout, rest) if answer.returncode == 0 else {}
        # Slurm purges a task that is canceled before it starts, while it still lists other tasks of the array.
        for run in rest:
            pattern = rf"^{run.job_number}_.*{_folder_of(run.job_id, run.id)}/?$"
            is_listed = re.search(pattern, squeue, re.MULTILINE)
            if run.id not in states and is_listed and not run.layout.job_log.exists():
                states[run.id] = Job(run.job_id, RunState.CANCELED, is_final=True)
    return states


def find_job(layout: RunLayout, environment: Mapping[str, str]) -> JobId | None:
    """Return this user's pending or running job of a run's script; FtkitError if Slurm does not respond."""
    states = "--states=CONFIGURING,PENDING,RUNNING,SUSPENDED"
    answer = _ask_squeue([states, f"--user={os.getuid()}", "--format=%i|%o"], environment)
    jobs = [line.strip().partition("|")[::2] for line in answer.splitlines()]
    name = f"(?:{layout.script.name}|{layout.array_script.name})"
    found = [job for job, script in jobs if re.search(f"{_folder_of(job, layout.root.name)}/{name}$", script)]
    return max(found, key=lambda job: int(job.partition("_")[0]), default=None)


def _folder_of(job_id: str, run: str) -> str:
    """Return a pattern of the folder where a run's job was submitted: the run's, or for an array any of the sweep's.

    Nothing matches the pattern if the job is the task of another run.
    """
    name, created, suffix = run.rsplit("-", 2)
    number = job_id.partition("_")[2]
    if number and not name.endswith(f"-{number}"):
        return "(?!)"
    any_number = r"\d+" if number else ""
    return f"/{name.removesuffix(number)}{any_number}-{created}-{suffix.removesuffix(number)}{any_number}"


def _ask_squeue(options: list[str], environment: Mapping[str, str]) -> str:
    """Return squeue's lines, each with a leading id; NoAnswerError if it prints anything else."""
    answer = ask(["squeue", "--noheader", "--array", *options], environment)
    problem = clean_stderr(answer.stderr)
    if answer.stdout.strip() and not re.search(r"^ *\d\S*\|", answer.stdout, re.MULTILINE):
        problem = f"squeue printed {one_line(answer.stdout)}"
    elif answer.returncode == 0 or "invalid job id" in problem.lower():
        return answer.stdout
    raise NoAnswerError(
        f"Slurm did not report job states: {problem}",
        meaning="its controller is busy, restarting, or not reachable from this machine",
        fix="try again in a minute; the runs themselves continue",
    )


# --- Their output -----------------------------------------------------------------------------

# The folder is the last field, because only it may contain the separator.
_SQUEUE_FORMAT = "%i|%T|%r|%S|%e|%N|%Z"
_SACCT_FIELDS = "JobID,State,Start,End,NodeList,ExitCode,WorkDir"
_NUM_FIELDS = 7

_ACTIVE = {
    RunState.PENDING: "CONFIGURING EXPEDITING PENDING POWER_UP_NODE REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD "
    "SPECIAL_EXIT",
    RunState.RUNNING: "COMPLETING RESIZING REVOKED RUNNING SIGNALING STAGE_OUT STOPPED SUSPENDED",
}
_STATES = {
    **{word: state for state, words in _ACTIVE.items() for word in words.split()},
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
    "TIMEOUT": RunState.TIMED_OUT,
}
_REASONS = {
    "BadConstraints": "no node has what it requests: it will never start",
    "BeginTime": "its start is delayed; after a requeue Slurm waits about two minutes",
    "Dependency": "it waits for {other}",
    "DependencyNeverSatisfied": "{other} failed: it will never start",
    "InvalidAccount": "its account may no longer be used: it will never start",
    "InvalidQOS": "its quality of service may no longer be used: it will never start",
    "JobArrayTaskLimit": "the sweep's --max-parallel limit is reached",
    "JobHeldAdmin": "an administrator or Slurm holds it; to release it: scontrol release {job}",
    "JobHeldUser": "it is held; to release it: scontrol release {job}",
    "JobHoldMaxRequeue": "it was requeued too often, and is held; to release it: scontrol release {job}",
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions": (
        "its nodes are down or reserved"
    ),
    "PartitionNodeLimit": "more nodes than the partition allows: it will never start",
    "PartitionTimeLimit": "a longer time limit than the partition allows: it will never start",
    "Priority": "other jobs are ahead of it",
    "ReqNodeNotAvail": "its nodes are down or reserved",
    "Reservation": "its reservation has not begun, or is full",
    "Resources": "it waits for free nodes",
    "job_requeued_in_held_state": "it was requeued and is held; to release it: scontrol release {job}",
    "launch_failed_requeued_held": (
        "a node could not start it ('sinfo -R' lists drained ones), and Slurm holds it; to release it: "
        "scontrol release {job}"
    ),
}
_STATES_IN_WORDS = {
    "CONFIGURING": "its nodes are starting",
    "EXPEDITING": "Slurm restarts it before all other jobs",
    "POWER_UP_NODE": "its nodes are starting",
    "REVOKED": "another cluster of the federation has started it",  # and it may have ended there
    "STOPPED": "Slurm has suspended it",
    "SUSPENDED": "Slurm has suspended it",
}
_LIMIT = re.compile("(?:Assoc|QOS)(?:Grp|Max|Min)|Max[A-Z]+Per")
"""Reasons like QOSMaxGRESPerUser and AssocGrpCpuLimit, of which Slurm has more than a hundred."""


def read_squeue(text: str, runs: Sequence[SubmittedRun]) -> dict[str, Job]:
    """Parse the state of each run from squeue's output. A listed job exists, even if its state is unknown here."""
    states = {}
    for run, (state, reason, start, end, nodes) in _rows(text, runs):
        seen = _read_job(run, state, start, end, nodes)
        if seen is None and _word(state):
            seen = Job(run.job_id, RunState.RUNNING, reason=f"Slurm reports the state {_word(state)}")
        if seen:
            states[run.id] = replace(seen, reason=seen.reason or _explain(state, reason, run.submission))
    return states


def read_sacct(text: str, runs: Sequence[SubmittedRun]) -> dict[str, Job]:
    """Parse sacct's output: the final state of each run.

    A job that sacct lists as active but squeue does not list is lost. sacct's reason is not used: it tells why the job
    was pending.
    """
    states = {}
    for run, (state, start, end, nodes, exit_code) in _rows(text, runs):
        seen = _read_job(run, state, start, end, nodes)
        if seen and seen.is_final:
            states[run.id] = replace(seen, exit_code=_exit_code(exit_code))
    return states


def _rows(text: str, runs: Sequence[SubmittedRun]) -> Iterator[tuple[SubmittedRun, list[str]]]:
    by_job: dict[str, list[SubmittedRun]] = {}
    for run in runs:
        by_job.setdefault(run.job_id, []).append(run)
    for line in text.splitlines():
        job_id, *values = line.split("|", _NUM_FIELDS - 1)
        folder = values.pop() if len(values) == _NUM_FIELDS - 1 else ""
        for run in by_job.get(job_id, ()):
            if re.search(f"{_folder_of(job_id, run.id)}/?$", folder):
                yield run, values


def _read_job(run: SubmittedRun, state: str, start: str, end: str, nodes: str) -> Job | None:
    known = _STATES.get(_word(state))
    if known is None:
        return None
    is_final = known not in _ACTIVE
    return Job(
        run.job_id,
        known,
        is_final=is_final,
        nodes="" if nodes in ("None assigned", "(null)") else nodes,
        started=float(start) if start.isdigit() else None,
        ended=float(end) if end.isdigit() and is_final else None,
    )


def _word(state: str) -> str:
    return state.split(maxsplit=1)[0].rstrip("+") if state else ""  # "CANCELLED by 1000"


def _explain(state: str, reason: str, submission: Submission) -> str:
    """Return squeue's reason with its meaning. Some reasons are printed as text, others have details after a comma."""
    word = _word(state)
    if word in _STATES_IN_WORDS:
        return _STATES_IN_WORDS[word]
    printed = reason[1:-1] if reason.startswith("(") else reason
    code, details = (printed, "") if printed.replace(" ", "_") in _REASONS else printed.partition(",")[::2]
    code = code.replace(" ", "_")
    if code in ("", "None", "null", "NonZeroExitCode") or word == "CANCELLED":  # then it is why the job was pending
        return ""
    meaning = _REASONS.get(code, "a limit of your account or its quality of service" if _LIMIT.match(code) else None)
    if meaning is None:
        return printed
    waits = {"the job that prepares its data and weights": submission.preparation_job_id,
             f"job {submission.after_job_id} of its sweep (--max-parallel)": submission.after_job_id}  # fmt: skip
    other = " and ".join(what for what, job_id in waits.items() if job_id) or "another job"
    meaning = meaning.format(job=submission.job_id, other=other) + (details and f" ({details.strip()})")
    return meaning if "," in code else f"{code}: {meaning}"


def _exit_code(text: str) -> int | None:
    """Convert Slurm's `code:signal` to the exit code that a shell reports."""
    code, _, signal_number = text.partition(":")
    if not code.isdigit():
        return None
    return 128 + int(signal_number) if signal_number.isdigit() and int(signal_number) else int(code)
