"""Read what squeue and sacct print.

Both are asked for each job's folder too: job ids start anew when a cluster is set up again, and another
cluster on the same file system has its own. A job in another folder than the run's is not the run's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit.runs.states import Observation, RunState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ftkit.runs.submission import SubmittedRun

# The folder stands last: it alone may hold the separator.
SQUEUE_FORMAT = "%A|%T|%r|%S|%e|%N|%Z"
SACCT_FIELDS = "JobIDRaw,State,Start,End,NodeList,ExitCode,WorkDir"

_ACTIVE = {
    "COMPLETING": RunState.RUNNING,
    "CONFIGURING": RunState.PENDING,
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
    "CANCELLED": RunState.CANCELLED,
    "COMPLETED": RunState.COMPLETED,
    "DEADLINE": RunState.TIMED_OUT,
    "FAILED": RunState.FAILED,
    "LAUNCH_FAILED": RunState.FAILED,
    "NODE_FAIL": RunState.NODE_FAILURE,
    "OUT_OF_MEMORY": RunState.OUT_OF_MEMORY,
    "PREEMPTED": RunState.PREEMPTED,
    "RECONFIG_FAIL": RunState.NODE_FAILURE,
    "REVOKED": RunState.CANCELLED,
    "TIMEOUT": RunState.TIMED_OUT,
}
_REASONS = {
    "BeginTime": "its start was put off; after a requeue Slurm waits about two minutes",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": "the job that it waits for failed: it will never start",
    "JobHeldAdmin": "an administrator holds it back",
    "JobHeldUser": "it is held back: scontrol release",
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
    """Return the states that squeue tells, by run."""
    states = {}
    for run, (state, reason, start, end, nodes) in _rows(text, 7, runs):
        seen = _observation(state, reason, start, end, nodes)
        if seen:
            states[run.id] = seen
    return states


def read_sacct(text: str, runs: Sequence[SubmittedRun]) -> dict[str, Observation]:
    """Return the final states that sacct tells, by run.

    A job that it calls active while squeue does not know it was lost; sacct's reason is why a job once waited.
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
    if word in ("SUSPENDED", "STOPPED"):
        return "Slurm has suspended it"
    code = reason.strip("()").partition(", UnavailableNodes")[0]
    if code in ("", "None", "null"):
        return ""
    meaning = _REASONS.get(code)
    return f"{code}: {meaning}" if meaning else code


def _time(text: str) -> float | None:
    return float(text) if text.isdigit() else None


def _exit_code(text: str) -> int | None:
    """Turn `code:signal` into what a shell would report."""
    code, _, signal_number = text.partition(":")
    if not code.isdigit():
        return None
    return 128 + int(signal_number) if signal_number.isdigit() and int(signal_number) else int(code)
