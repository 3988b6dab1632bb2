"""Why a run failed, for every command that reports it: one reason, one exit code, one piece of advice."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftkit.errors import (
    DiskFullError,
    MemoryExhaustedError,
    NotFoundError,
    PrerequisiteError,
    RunFailedError,
    SubmitError,
    UnfitMachineError,
)
from ftkit.files import read_json_if_valid
from ftkit.runs.job import FAILURES, RunState
from ftkit.runs.rank_errors import RankError
from ftkit.runs.summary import first_error

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout
    from ftkit.runs.job import Job, SubmittedRun


_CODES_OF_SCRIPTS = {error.exit_code for error in (NotFoundError, PrerequisiteError, SubmitError, UnfitMachineError)}
"""Exit codes with which a job script itself ends; it has logged why."""


@dataclass(frozen=True)
class Failure:
    """Why a run failed.

    Attributes:
        exit_code: the error's exit code if the user can act on it, else that of a failed run.
        error: the error of the rank that failed first; None if no rank recorded one.
        can_resume: whether the run can continue as planned once the cause is fixed.
        is_in_code: whether the user's code failed: the run has a copy of it, which `ftkit resume` would start again.
    """

    exit_code: int
    error: RankError | None
    can_resume: bool
    is_in_code: bool = False


def explain_failure(run: SubmittedRun, seen: Job) -> Failure | None:
    """Return why a run failed; None if it did not."""
    if seen.state not in FAILURES:
        return None
    error = first_error(run.layout, since=max(run.submission.submitted, seen.started or 0.0))
    if error and error.is_actionable:
        return Failure(error.exit_code, error, error.can_resume)
    if run.layout.disk_full.exists():
        return Failure(DiskFullError.exit_code, None, can_resume=True)
    if seen.state is RunState.OUT_OF_MEMORY:
        return Failure(MemoryExhaustedError.exit_code, error, can_resume=False)
    if seen.exit_code in _CODES_OF_SCRIPTS:
        return Failure(seen.exit_code, error, can_resume=True)
    # If Slurm ended the job, exceptions of ranks follow from that.
    is_in_code = seen.state is RunState.FAILED and error is not None and _is_in_code(error, run.layout)
    return Failure(RunFailedError.exit_code, error, can_resume=not is_in_code, is_in_code=is_in_code)


def _is_in_code(error: RankError, layout: RunLayout) -> bool:
    """Return whether an exception was raised in the user's code, or in what it called."""
    is_exception = not error.was_killed and not error.reports_lost_peer
    return is_exception and (layout.is_script or f'"{layout.code}/' in error.traceback)


def original_command(layout: RunLayout) -> str:
    """Return the command that started a run, to be typed again."""
    words = (read_json_if_valid(layout.manifest, dict[str, Any]) or {}).get("command")
    is_known = isinstance(words, list) and all(isinstance(word, str) and "***" not in word for word in words)
    return shlex.join(words) if is_known and words else "ftkit run …"
