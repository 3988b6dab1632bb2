"""The state of runs, from their scheduler and their own files.

A final state is written to the run's folder (state.json), so that ftkit can show a finished run without the scheduler,
or after the scheduler has purged the job.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftkit import process
from ftkit.errors import EXIT_CODES, DiskFullError, FtkitError, NoAnswerError
from ftkit.files import read_json_if_valid, read_small, write_json
from ftkit.launch.scheduler import scheduler_for
from ftkit.runs.ends import find_slurms_words, find_wait
from ftkit.runs.job import FAILURES, STATES, Cause, Job, RunState, SubmittedRun
from ftkit.runs.lease import current_holder, last_touch
from ftkit.runs.manifest import read_starts
from ftkit.runs.metrics_file import read_last_record
from ftkit.runs.records import EndRecord, Seconds

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout
    from ftkit.runs.listing import RunEntry


LOST = "Slurm no longer knows the job, and it left no exit code"  # reason of state unknown, if Slurm answered


@dataclass(frozen=True)
class _FinalState:
    """The content of state.json: a final state, and the time of the observation."""

    observed: Seconds
    job: Job


@dataclass(frozen=True)
class Overview:
    """The states of several runs by id, and the reasons why some schedulers could not be queried."""

    states: dict[str, Job]
    warnings: tuple[str, ...]

    def state_of(self, entry: RunEntry) -> Job:
        """Return the state of a listed run, including damaged runs and runs without a job."""
        if entry.damage:
            state = RunState.UNREADABLE if entry.is_private else RunState.DAMAGED
            return Job(entry.run.job_id if entry.run else None, state, reason=entry.damage)
        return self.states.get(entry.folder.id, Job(None, RunState.UNKNOWN, reason="never submitted"))


def observe(run: SubmittedRun) -> Job:
    return observe_all([run], asks_again=True).states[run.id]


def observe_all(runs: Sequence[SubmittedRun], *, asks_again: bool = False) -> Overview:
    """Return the states of many runs. Each scheduler is queried once, for the runs that may still change.

    With `asks_again`, Slurm is also queried for runs with a final state: an ended job can be requeued by hand. Such a
    run is unknown while Slurm does not answer.
    """
    states: dict[str, Job] = {}
    warnings = []
    for run in runs:
        if asks_again and run.submission.scheduler == "slurm":
            continue
        if known := _read_final(run) or _completed_from_files(run):
            states[run.id] = known
    for name in ("local", "slurm"):
        open_runs = [run for run in runs if run.submission.scheduler == name and run.id not in states]
        if not open_runs:
            continue
        try:
            seen = scheduler_for(name).observe(open_runs)
            preparations = scheduler_for(name).observe([*_unclear_preparations(open_runs, seen)])
        except FtkitError as error:
            warnings.append(error.what)
            may_be_active = asks_again and isinstance(error, NoAnswerError)
            for run in open_runs:
                known = None if may_be_active else _read_final(run, even_if_old=True)
                states[run.id] = known or _judge_alone(run, error, is_certain=not may_be_active)
            continue
        for run in open_runs:
            reported = seen.get(run.id)
            is_active = reported is not None and not reported.is_final
            known = None if is_active else _read_final(run) or _completed_from_files(run)
            states[run.id] = known or _conclude(run, reported, preparations.get(run.id))
            if not known and states[run.id].is_final and (reported is None or reported.is_final):
                _write_final(run, states[run.id])
    return Overview(states, tuple(warnings))


def _unclear_preparations(runs: Sequence[SubmittedRun], seen: Mapping[str, Job]) -> Iterator[SubmittedRun]:
    """Yield the preparations, as runs, that left no exit code although Slurm canceled the jobs that depend on them."""
    for run in runs:
        job, number = seen.get(run.id), run.submission.preparation_job_id
        if job and job.state is RunState.CANCELED and number and _exit_code(run, number) is None:
            yield SubmittedRun(run.layout, replace(run.submission, job_id=number))


def _judge_alone(run: SubmittedRun, error: FtkitError, *, is_certain: bool) -> Job:
    """Derive the state from the run's folder, because its scheduler can't be queried; final only if `is_certain`."""
    if (waits := find_wait(run.layout)) and _exit_code(run) is None:
        return Job(run.job_id, RunState.RUNNING, reason=waits)
    if holder := current_holder(run.layout):
        return Job(run.job_id, RunState.RUNNING, nodes=holder.host, started=holder.since)
    if is_certain and (_exit_code(run) is not None or run.layout.canceled.exists()):
        return _conclude(run, None)
    return Job(run.job_id, RunState.UNKNOWN, reason=error.what)


def _conclude(run: SubmittedRun, seen: Job | None, preparation: Job | None = None) -> Job:
    """Derive the state from all sources; `seen` is the scheduler's answer, None if it does not know the job.

    `preparation` is its answer about the job that prepares the run, if that is needed.
    """
    end = _end(run)
    stopped_at = ""
    if end and end.outcome == "stopped":
        stopped_at = "checkpoint of step {} written" if end.has_checkpoint else "asked to stop at step {}"
        stopped_at = stopped_at.format(end.step)
    if seen and not seen.is_final:
        seen = _judge_active(run, seen, stopped_at)
        if not seen.is_final:
            return seen
    last = seen or _state_from_files(run, stopped_at)
    holder = current_holder(run.layout)
    # When Slurm reports the end of a job, its processes have ended too, except on lost nodes.
    has_ended = seen is not None and seen.state is not RunState.NODE_FAILURE
    if holder and not (has_ended and holder.job_id == run.job_id):
        reason = f"its job has ended, but a process still trains in its folder: {holder}"
        return Job(run.job_id, RunState.RUNNING, nodes=holder.host, started=holder.since, reason=reason)
    was_canceled = run.layout.canceled.exists()
    has_completed = end is not None and end.outcome == "completed"
    if last.is_final and (was_canceled or last.state is RunState.CANCELED) and has_completed:
        last = replace(last, state=RunState.COMPLETED, reason="", exit_code=0)  # just before it was canceled
    elif last.is_final and was_canceled:
        return replace(last, state=RunState.CANCELED, reason="")
    last = _failed_preparation(run, last, preparation) or last
    by_slurm = _read_slurms_words(run) if last.state is RunState.FAILED else None
    if by_slurm and by_slurm.state is RunState.OUT_OF_MEMORY:  # of a step; Slurm reports the exit code of the script
        last = replace(last, state=by_slurm.state)
    if last.is_final and stopped_at:
        state = RunState.STOPPED if last.state is RunState.COMPLETED else last.state
        last = replace(last, state=state, reason=stopped_at)
    if last.state is RunState.FAILED and run.layout.disk_full.exists():
        code = DiskFullError.exit_code
        return replace(last, reason=EXIT_CODES[code], exit_code=code, cause=Cause.DISK_FULL)
    return last if last.exit_code is not None else replace(last, exit_code=_exit_code(run))


def _judge_active(run: SubmittedRun, seen: Job, stopped_at: str) -> Job:
    """Return the state of a run whose job the scheduler lists as active; final if the job's script has ended."""
    if seen.state is RunState.PENDING and stopped_at:
        waits = f"{stopped_at}; waits to continue" + (f" ({seen.reason})" if seen.reason else "")
        return replace(seen, state=RunState.STOPPED, reason=waits)
    if seen.state is not RunState.RUNNING or run.submission.scheduler != "slurm":
        return seen
    if _exit_code(run) is None:
        return replace(seen, reason=seen.reason or find_wait(run.layout))
    # Slurm lists a job for up to a minute after the script's end, while it cleans up the nodes.
    ended = run.layout.job_exit_code(run.job_id).stat().st_mtime
    return replace(_state_from_files(run, stopped_at), nodes=seen.nodes, started=seen.started, ended=ended)


def _failed_preparation(run: SubmittedRun, last: Job, seen: Job | None) -> Job | None:
    """Return how a run ended if its preparation failed: Slurm then cancels the training job that depends on it."""
    job_id = run.submission.preparation_job_id
    if job_id is None or last.state not in (RunState.CANCELED, RunState.UNKNOWN) or _exit_code(run) is not None:
        return None
    code = _exit_code(run, job_id)
    if code == 0 or (code is None and last.state is RunState.UNKNOWN):
        return None
    if code is None and seen and seen.state not in FAILURES:  # the user canceled the training job with scancel
        return None
    reason = f"its data and weights could not be prepared (job {job_id})"
    if run.layout.disk_full.exists():
        code = DiskFullError.exit_code
    return Job(run.job_id, RunState.FAILED, is_final=True, reason=reason, exit_code=code, ended=last.ended)


def _state_from_files(run: SubmittedRun, stopped_at: str) -> Job:
    exit_code, by_slurm = _exit_code(run), _read_slurms_words(run)
    if by_slurm and not (exit_code == 0 and by_slurm.state is RunState.OUT_OF_MEMORY):
        return replace(by_slurm, exit_code=exit_code)  # a stop request may also have left an exit code
    if exit_code is not None or stopped_at:
        state = RunState.FAILED if exit_code else RunState.COMPLETED
        return Job(run.job_id, state, is_final=True, exit_code=exit_code)
    if run.layout.canceled.exists():
        return Job(run.job_id, RunState.CANCELED, is_final=True)
    if run.submission.scheduler == "local":
        cause, reason = Cause.KILLED, "its processes were killed (SIGKILL): its script left no exit code"
        if process.system_start() > run.submission.submitted:
            cause, reason = Cause.REBOOT, f"{run.submission.host} was restarted while it ran"
        return Job(run.job_id, RunState.FAILED, is_final=True, reason=reason, cause=cause)
    return _read_final(run, even_if_old=True) or Job(run.job_id, RunState.UNKNOWN, reason=LOST)


def _read_slurms_words(run: SubmittedRun) -> Job | None:
    """Return how Slurm ended the run, from its messages in the job's log; None if it did not."""
    end = find_slurms_words(run.layout, job_id=run.job_id)
    return Job(run.job_id, STATES[end.cause], is_final=True, reason=end.detail) if end and end.cause in STATES else None


def _completed_from_files(run: SubmittedRun) -> Job | None:
    """Detect a completed run from its files, without querying the scheduler, and record its state."""
    end = _end(run) if _exit_code(run) == 0 else None
    if end is None or end.outcome != "completed":
        return None
    began = next((time for time, _ in read_starts(run.layout) if time > run.submission.submitted), None)
    seen = Job(run.job_id, RunState.COMPLETED, is_final=True, exit_code=0, started=began, ended=end.time)
    _write_final(run, seen)
    return seen


def _end(run: SubmittedRun) -> EndRecord | None:
    """Return the trainer's last record if it is an end of this job's training; None if that continues or died."""
    last = read_last_record(run.layout.metrics)
    return last if isinstance(last, EndRecord) and last.time > run.submission.submitted else None


def _exit_code(run: SubmittedRun, job_id: str | None = None) -> int | None:
    """Return the exit code that the run's job, or the given job, left; None if there is none."""
    try:
        code = int(read_small(run.layout.job_exit_code(job_id or run.job_id)))
    except (OSError, ValueError):
        return None
    return code if code in range(256) else None


def _read_final(run: SubmittedRun, *, even_if_old: bool = False) -> Job | None:
    """Read the final state, unless the run was submitted again or requeued since."""
    known = read_json_if_valid(run.layout.state, _FinalState)
    if known is None or known.job.id != run.job_id or not known.job.is_final:
        return None
    return known.job if even_if_old or _last_change(run.layout) <= known.observed else None


def _write_final(run: SubmittedRun, seen: Job) -> None:
    """Record a final state; do nothing if the folder is another user's and not writable."""
    with suppress(OSError):
        write_json(run.layout.state, _FinalState(max(time.time(), _last_change(run.layout)), seen))


def _last_change(layout: RunLayout) -> float:
    try:
        return max(layout.metrics.stat().st_mtime, last_touch(layout))
    except OSError:
        return last_touch(layout)
