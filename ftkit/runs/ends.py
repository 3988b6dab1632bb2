"""Determine why a start of a run's training ended: one value, for all commands that show it.

The sources, in order of precedence: Slurm's messages in the job's log, which need neither accounting nor network; the
note of the job script, or of `ftkit resume`, which asks the scheduler; the trainer's last record; and the errors of the
ranks. If no source has the cause, it is unknown; it is never guessed.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import TYPE_CHECKING, Final

from ftkit.errors import MemoryExhaustedError, one_line
from ftkit.files import open_regular, read_small, write_file
from ftkit.process import without_control
from ftkit.runs.failure import first_error
from ftkit.runs.job import CAUSES, Cause, Job
from ftkit.runs.metrics_file import read_last_step, read_records
from ftkit.runs.records import EndRecord

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout


@dataclass(frozen=True)
class End:
    """How a start ended: the cause, and, if there is one, the node or the error of a rank."""

    cause: Cause
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.cause.words}: {self.detail}" if self.detail else self.cause.words

    @classmethod
    def from_json(cls, value: object) -> End | None:
        """Read an end from a manifest; None if there is none."""
        if not isinstance(value, dict):
            return None
        cause = value.get("cause")
        return cls(Cause(cause) if cause in list(Cause) else Cause.UNKNOWN, str(value.get("detail") or ""))

    @classmethod
    def of_run(cls, seen: Job) -> End | None:
        """Return how a run's last start ended, by its observed state; None if only the ranks know."""
        cause = seen.cause or CAUSES.get(seen.state)
        return cls(cause) if cause else None


def note_end(layout: RunLayout, end: End) -> None:
    """Note why the last start ended, for the next start, whose ranks can't know it."""
    write_file(layout.end_reason, f"{end.cause}\t{end.detail}\n".encode())


def find_end(layout: RunLayout, since: float) -> tuple[End, dict[str, str] | None]:
    """Determine how the start that began at `since` ended; called before its files are removed.

    Returns the end and, if a rank recorded an error, the step and the error without parts that vary between
    occurrences, so that the same failure is recognized.
    """
    words, note = find_slurms_words(layout, since=since), None
    if words and words.cause not in _FOLLOWS:
        return words, None
    with suppress(OSError):
        cause, _, text = read_small(layout.end_reason).decode(errors="replace").strip().partition("\t")
        note = End(Cause(cause), text) if cause in set(Cause) else None
    if end := note or words:
        return end, None
    # Preparing the data for the next start adds records after this one.
    records = read_records(layout.metrics, skips_steps=True)
    last = next((each for each in reversed(records) if isinstance(each, EndRecord)), None)
    if last and last.time >= since:
        return End({"stopped": Cause.STOP_REQUEST, "completed": Cause.MORE_STEPS}[last.outcome]), None
    error = first_error(layout, since=since)
    if error is None:
        return _end_by_exit_code(layout, since), None
    step = read_last_step(layout.metrics)
    where = f"after step {step.step}" if step and step.time >= since else "before its first step"
    detail = f"rank {error.rank} on {error.host}: {error.type}: {one_line(error.message)}"
    if error.cause:
        detail += f"; {error.cause}"
    cause = Cause.ERROR
    if error.exit_code == MemoryExhaustedError.exit_code:
        cause = Cause.OUT_OF_MEMORY
    elif error.reports_lost_peer:
        cause = Cause.LOST_PEERS
    elif error.was_killed:
        cause = Cause.KILLED
    # Addresses, ports and process ids vary; if all ranks fail in the same way, any rank may be first.
    same = re.sub(r"0x[0-9a-f]+|\d+", "#", f"{error.type}: {one_line(error.message)}")
    return End(cause, detail), {"where": where, "error": same}


def _end_by_exit_code(layout: RunLayout, since: float) -> End:
    """Determine the end of a start without any other trace from the exit code that the job script logged."""
    found = [match for line in _lines_of_start(layout, since) if (match := _EXIT_CODE.search(line))]
    if not found:
        return End(Cause.UNKNOWN, "no rank left an error, and the job's log has no reason")
    code = int(found[-1][1])
    if code == 128 + signal.SIGKILL:
        return End(Cause.KILLED, "its launcher, by signal 9")
    return End(Cause.UNKNOWN, f"training ended with exit code {code}, and no rank left an error")


# --- Slurm's words -------------------------------------------------------------------------------

_LOG_BYTES = 2**20
_TRAINING = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ) ftkit: training\b")
"""The line that the job script logs before each start of training."""
_JOB = re.compile(r"\S+Z ftkit: job \d\S* on ")
"""The line that it logs first, also after a requeue."""
_EXIT_CODE = re.compile(r"Z ftkit: (?:error: )?training ended with exit code (\d+)")
"""The line that it logs when training has ended with an error."""
_WORDS: Final = re.compile(
    r"error: \*\*\* (?P<unit>JOB|STEP) (?P<job>\d+)\S* ON (?P<node>\S+) CANCELLED AT \S+"
    r"(?: DUE TO (?P<why>PREEMPTION|TIME LIMIT|NODE FAILURE|JOB REQUEUE))?"
    r"|Detected \d+ oom[_-]kill events?(?:\(s\))?(?: in (?:StepId=|step )(?P<killed>\d+))?"
    r"|: (?:task|tasks) \S+: Out Of Memory|exceeded memory limit"
)
"""Messages of slurmstepd (req.c, task/cgroup) and srun when a job or a step is ended before its programs exit.

`error` is preceded by slurmstepd's name, or in Slurm 26.05 by a time in brackets."""
_CAUSES_IN_WORDS: Final = {
    "PREEMPTION": Cause.PREEMPTED,
    "TIME LIMIT": Cause.TIME_LIMIT,
    "NODE FAILURE": Cause.NODE_FAILURE,
    "JOB REQUEUE": Cause.REQUEUED,
}
_FOLLOWS: Final = {Cause.CANCELED, Cause.REQUEUED}
"""Causes that Slurm also logs when a job script requeues its job, or the user cancels it for a known reason."""
_FAILED_NODE: Final = re.compile(r"srun: error: Node failure on (\S+)")


def find_slurms_words(layout: RunLayout, *, since: float | None = None, job_id: str | None = None) -> End | None:
    """Return why Slurm ended a start, from its messages in the job's log; None if there are none.

    The first message counts; later ones are consequences. `since` is when the start recorded itself, if another one
    has begun since; the default is the last start. If `job_id` is given, messages about other jobs are ignored, except
    for a task of a job array, whose messages have another number than its id.
    """
    lines = _lines_of_start(layout, since)
    own = None if "_" in (job_id or "_") else job_id
    for line in lines:
        found = _WORDS.search(line)
        if found is None or (own and (found["job"] or found["killed"] or own) != own):
            continue
        if found["job"] is None:
            return End(Cause.OUT_OF_MEMORY)
        if found["why"]:
            nodes = [match[1] for each in lines if (match := _FAILED_NODE.search(each))]
            cause = _CAUSES_IN_WORDS[found["why"]]
            return End(cause, ", ".join(dict.fromkeys(nodes)) if cause is Cause.NODE_FAILURE else "")
        if found["unit"] == "JOB":  # for a STEP, srun writes the same if one of its tasks failed
            return End(Cause.CANCELED)
    return None


def _lines_of_start(layout: RunLayout, since: float | None) -> list[str]:
    """Return the lines of the job's log since a start recorded itself, up to the next start."""
    lines = log_tail(layout, num_lines=None, num_bytes=_LOG_BYTES)
    starts = {index: match[1] for index, line in enumerate(lines) if (match := _TRAINING.match(line))}
    if since is None:
        jobs = (index for index, line in enumerate(lines) if _JOB.match(line))
        return lines[max(chain(starts, jobs), default=0) :]
    begun = [index for index, time in starts.items() if datetime.fromisoformat(time).timestamp() <= since]
    return lines[max(begun, default=0) : max(starts, default=None)]


def find_wait(layout: RunLayout) -> str:
    """Return since when a job script has been waiting for Slurm's controller; empty if it has logged anything since."""
    last = next((line for line in reversed(log_tail(layout, num_lines=None)) if "Z ftkit: " in line), "")
    found = re.search(r"Z ftkit: (waiting for Slurm's controller since \S+):", last)
    return found[1] if found else ""


def log_tail(layout: RunLayout, num_lines: int | None = 20, num_bytes: int = 2**16) -> list[str]:
    """Return the last lines of the job's log within its last `num_bytes`; all of these lines if `num_lines` is None."""
    try:
        with open_regular(layout.job_log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
            text = without_control(file.read().decode("utf-8", errors="replace"))
            return text.splitlines()[-(num_lines or 0) :]
    except OSError:
        return []


def excluded_nodes(layout: RunLayout) -> dict[str, str]:
    """Return the nodes that preflights have excluded so far, with the reason."""
    try:
        lines = read_small(layout.excluded_nodes).decode(errors="replace").splitlines()
    except OSError:
        return {}
    rows = (line.split("\t", 3) for line in lines)  # time, job, node, reason
    return {row[2]: row[3] for row in rows if len(row) == 4}  # noqa: PLR2004


def silent_nodes(layout: RunLayout) -> dict[str, tuple[float, str]]:
    """Return the nodes of the current start without heartbeats: the time of the last one, and the node that missed it.

    `ftkit.train.heartbeats` notes them; the job script clears the notes when it starts training again.
    """
    found = {}
    with suppress(OSError):
        for path in sorted(layout.silent_nodes.iterdir()):
            since, _, peer = read_small(path).decode(errors="replace").strip().partition("\t")
            if since.isdecimal():
                found[path.name] = float(since), peer
    return found
