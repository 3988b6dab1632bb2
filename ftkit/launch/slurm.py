"""Slurm's command-line programs, and the states of jobs as squeue and sacct print them.

Their JSON output is not used, because its structure differs between releases (22.05 to 26.05).
Both programs also print each job's folder: job ids start again at 1 when a cluster is reinstalled, and another cluster
on the same file system has its own. A job in another folder than the run's is not the run's.
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
from ftkit.errors import NoAnswerError, PrerequisiteError
from ftkit.runs.job import Job, RunState, Submission, SubmittedRun

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout

_IDS_IN_A_QUERY = 400


def ask(args: list[str], environment: Mapping[str, str], *, cwd: Path | None = None) -> process.ProgramOutput:
    """Run a program of Slurm; PrerequisiteError if it is not here, ProgramTimeoutError if it does not respond."""
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
    """Return the states of runs. squeue is queried first: it lists a requeued job, while sacct may report it as ended.

    sacct fails on clusters without accounting; then the runs' own files decide. Raises `NoAnswerError` if squeue does
    not respond.
    """
    states: dict[str, Job] = {}
    for first in range(0, len(runs), _IDS_IN_A_QUERY):
        some = runs[first : first + _IDS_IN_A_QUERY]
        command = ["squeue", "--noheader", "--states=all", f"--format={_SQUEUE_FORMAT}", _jobs(some)]
        answer = ask(command, os.environ)
        if answer.returncode != 0 and not re.search("invalid job id", answer.stderr, re.IGNORECASE):
            raise _no_states(answer.stderr)
        states |= read_squeue(answer.stdout, some)
        if rest := [run for run in some if run.id not in states]:
            with suppress(PrerequisiteError, process.ProgramTimeoutError):
                answer = ask(["sacct", "-P", "-X", "-n", f"--format={_SACCT_FIELDS}", _jobs(rest)], os.environ)
                states |= read_sacct(answer.stdout, rest) if answer.returncode == 0 else {}
    return states


def _jobs(runs: Sequence[SubmittedRun]) -> str:
    return f"--jobs={','.join(run.job_id for run in runs)}"


def find_job(layout: RunLayout, environment: Mapping[str, str]) -> str | None:
    """Return this user's pending or running job of a run's script; FtkitError if Slurm does not respond."""
    states = "--states=CONFIGURING,PENDING,RUNNING,SUSPENDED"
    words = ["squeue", "--noheader", states, f"--user={os.getuid()}", "--format=%A|%o"]
    answer = ask(words, environment)
    if answer.returncode != 0:
        raise _no_states(answer.stderr)
    jobs = [line.partition("|")[::2] for line in answer.stdout.splitlines()]
    suffix = f"/{layout.root.name}/{layout.script.name}"
    found = [job for job, script in jobs if job.isdigit() and script.strip().endswith(suffix)]
    return max(found, key=int, default=None)


def _no_states(stderr: str) -> NoAnswerError:
    return NoAnswerError(
        f"Slurm did not report job states: {clean_stderr(stderr)}",
        meaning="its controller is busy, restarting, or not reachable from this machine",
        fix="try again in a minute; the runs themselves continue",
    )


# --- Their output -----------------------------------------------------------------------------

# The folder comes last, because only it may contain the separator.
_SQUEUE_FORMAT = "%A|%T|%r|%S|%e|%N|%Z"
_SACCT_FIELDS = "JobIDRaw,State,Start,End,NodeList,ExitCode,WorkDir"
_NUM_FIELDS = 7

_ACTIVE = {
    RunState.PENDING: "CONFIGURING EXPEDITING PENDING POWER_UP_NODE REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD "
    "SPECIAL_EXIT",
    RunState.RUNNING: "COMPLETING RESIZING RUNNING SIGNALING STAGE_OUT STOPPED SUSPENDED",
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
    "REVOKED": RunState.CANCELED,
    "TIMEOUT": RunState.TIMED_OUT,
}
_REASONS = {
    "BadConstraints": "no node has what it requests: it will never start",
    "BeginTime": "its start is delayed; after a requeue Slurm waits about two minutes",
    "Dependency": "it waits for {other}",
    "DependencyNeverSatisfied": "{other} failed: it will never start",
    "InvalidAccount": "its account may no longer be used: it will never start",
    "InvalidQOS": "its quality of service may no longer be used: it will never start",
    "JobHeldAdmin": "an administrator holds it",
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
        "a node could not start it, and Slurm holds it; to let it start again: scontrol release {job}"
    ),
}
_LIMIT = re.compile("(?:Assoc|QOS)(?:Grp|Max|Min)|Max[A-Z]+Per")
"""Reasons like QOSMaxGRESPerUser and AssocGrpCpuLimit, of which Slurm has more than a hundred."""


def read_squeue(text: str, runs: Sequence[SubmittedRun]) -> dict[str, Job]:
    """Parse squeue's output: the state of each run. A job that is listed exists, also in a state unknown here."""
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

    A job that sacct lists as active but squeue does not list is lost. sacct's reason is not used: it is why the job was
    once pending.
    """
    states = {}
    for run, (state, start, end, nodes, exit_code) in _rows(text, runs):
        seen = _read_job(run, state, start, end, nodes)
        if seen and seen.is_final:
            states[run.id] = replace(seen, exit_code=_exit_code(exit_code))
    return states


def _rows(text: str, runs: Sequence[SubmittedRun]) -> Iterator[tuple[SubmittedRun, list[str]]]:
    by_job = {run.job_id: run for run in runs}
    for line in text.splitlines():
        job_id, *values = line.split("|", _NUM_FIELDS - 1)
        run = by_job.get(job_id)
        if run and len(values) == _NUM_FIELDS - 1 and values.pop().rstrip("/").endswith(f"/{run.id}"):
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
    """Return squeue's reason with its meaning. It prints some reasons in words, others with details after a comma."""
    word = _word(state)
    if word in ("CONFIGURING", "POWER_UP_NODE"):
        return "its nodes are starting"
    if word == "EXPEDITING":
        return "Slurm restarts it before all other jobs"
    if word in ("SUSPENDED", "STOPPED"):
        return "Slurm has suspended it"
    printed = reason.strip("()")
    code = printed if printed.replace(" ", "_") in _REASONS else printed.partition(",")[0]
    code = code.replace(" ", "_")
    if code in ("", "None", "null", "NonZeroExitCode") or word == "CANCELLED":  # then it is why the job was pending
        return ""
    meaning = _REASONS.get(code, "a limit of your account or its quality of service" if _LIMIT.match(code) else None)
    if meaning is None:
        return printed
    waits = {"the job that prepares its data and weights": submission.preparation_job_id,
             f"job {submission.after_job_id} of its sweep (--max-parallel)": submission.after_job_id}  # fmt: skip
    other = " and ".join(what for what, job_id in waits.items() if job_id) or "another job"
    meaning = meaning.format(job=submission.job_id, other=other)
    return meaning if "," in code else f"{code}: {meaning}"


def _exit_code(text: str) -> int | None:
    """Convert Slurm's `code:signal` to the exit code that a shell reports."""
    code, _, signal_number = text.partition(":")
    if not code.isdigit():
        return None
    return 128 + int(signal_number) if signal_number.isdigit() and int(signal_number) else int(code)
