"""Why a run failed: the errors of its ranks, and the resulting reason, exit code and advice.

A rank that fails, or its launcher, writes the error next to its log.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ftkit.errors import (
    EXIT_CODES,
    DiskFullError,
    FtkitError,
    MemoryExhaustedError,
    NoAnswerError,
    NotFoundError,
    PrerequisiteError,
    RunFailedError,
    SubmitError,
    UnfitMachineError,
    redact,
)
from ftkit.files import read_json_if_valid, write_json
from ftkit.runs.job import FAILURES, Job, RunState, SubmittedRun
from ftkit.runs.records import Count, Seconds

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout

_LOST_PEER = re.compile(
    r"(connection|socket) (was )?(closed|reset|refused)|broken pipe|remote process exited|communicator was aborted"
    r"|timed out (waiting|after)|socket timeout",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL and torch's store in the remaining ranks after another rank has ended."""
_CLOCK_TOLERANCE_SECONDS = 60
_CODES_OF_SCRIPTS = {
    error.exit_code for error in (NoAnswerError, NotFoundError, PrerequisiteError, SubmitError, UnfitMachineError)
}
"""Exit codes of the job script itself, which logs the reason."""


@dataclass(frozen=True)
class RankError:
    """The error that ended a rank; `exit_code` is that of its class if the user can act on it, else 1."""

    time: Seconds
    rank: Count
    host: str
    type: str
    message: str
    traceback: str
    exit_code: Annotated[int, Field(ge=1, le=255)]
    can_resume: bool = True
    cause: str = ""  # the node's hardware or system fault that explains it, if known

    @property
    def is_actionable(self) -> bool:
        """Whether the message suffices and the traceback would not help the user."""
        return self.exit_code != 1

    @property
    def was_killed(self) -> bool:
        """Whether a signal killed the rank; its launcher records the signal's name."""
        return self.type.startswith("SIG")

    @property
    def reports_lost_peer(self) -> bool:
        """Whether this error only reports the loss of another rank, whose error is the cause."""
        return self.exit_code == 1 and _LOST_PEER.search(self.message) is not None

    @classmethod
    def from_exception(cls, error: BaseException, *, rank: int) -> RankError:
        return cls(
            time=time.time(),
            rank=rank,
            host=socket.gethostname(),
            type=type(error).__name__,
            message=redact(str(error), os.environ),
            traceback=redact("".join(traceback.format_exception(error)), os.environ),
            exit_code=error.exit_code if isinstance(error, FtkitError) else 1,
            can_resume=not isinstance(error, FtkitError) or error.can_resume,
        )


def write_rank_error(path: Path, error: RankError) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, error)


def record_rank_error(error: Exception, path: Path, disk_full: Path, *, rank: int) -> int:
    """Record the error that ended a rank; return its exit code. If the disk is full, also create `disk_full`."""
    recorded = RankError.from_exception(error, rank=rank)
    with suppress(OSError):
        if isinstance(error, DiskFullError):
            disk_full.touch()
        write_rank_error(path, recorded)
    return recorded.exit_code


def read_rank_error(path: Path) -> RankError | None:
    """Read an error; None if the file is invalid. An unknown exit code, from another version of ftkit, becomes 1."""
    error = read_json_if_valid(path, RankError)
    return error if error is None or error.exit_code in EXIT_CODES else replace(error, exit_code=1)


def first_error(layout: RunLayout, *, since: float) -> RankError | None:
    """Return the error of the rank that failed first after `since`.

    Ranks that only report a lost peer did not fail first, even if their clocks say so.
    """
    try:
        paths = list(layout.logs.glob("error-*.json"))
    except OSError:  # this user may not read it
        return None
    errors = [error for path in paths if (error := read_rank_error(path))]
    recent = [error for error in errors if error.time >= since - _CLOCK_TOLERANCE_SECONDS]
    return min(recent, key=lambda error: (not error.cause, error.reports_lost_peer, error.time), default=None)


@dataclass(frozen=True)
class Failure:
    """Why a run failed, with the error of the rank that failed first, if a rank recorded one."""

    exit_code: int  # the error's if the user can act on it, else that of a failed run
    error: RankError | None
    can_resume: bool = True  # with the same plan, once the cause is fixed
    is_in_code: bool = False  # the user's code failed: `ftkit resume` would start the run's copy of it again


def explain_failure(run: SubmittedRun, seen: Job) -> Failure | None:
    if seen.state not in FAILURES:
        return None
    layout = run.layout
    since = max(run.submission.submitted, seen.started or 0.0)
    error = first_error(layout, since=since)
    if error and error.time < since and seen.exit_code in _CODES_OF_SCRIPTS:
        error = None  # of an earlier job
    if error and error.is_actionable:
        return Failure(error.exit_code, error, error.can_resume)
    if layout.disk_full.exists():
        return Failure(DiskFullError.exit_code, None)
    if seen.state is RunState.OUT_OF_MEMORY:
        return Failure(MemoryExhaustedError.exit_code, error, can_resume=False)
    if seen.exit_code in _CODES_OF_SCRIPTS:
        return Failure(seen.exit_code, None)
    # If Slurm ended the job, or another rank or a signal ended this rank, exceptions of ranks are consequences.
    is_cause = seen.state is RunState.FAILED and error and not error.was_killed and not error.reports_lost_peer
    is_in_code = bool(is_cause and error and (layout.is_script or f'"{layout.code}/' in error.traceback))
    return Failure(RunFailedError.exit_code, error, can_resume=not is_in_code, is_in_code=is_in_code)


def original_command(layout: RunLayout) -> str:
    """Return the command that started a run, to be typed again."""
    words = (read_json_if_valid(layout.manifest, dict[str, object]) or {}).get("command")
    if not isinstance(words, list) or not words or any("***" in str(word) for word in words):
        return "ftkit run …"
    return shlex.join(map(str, words))
