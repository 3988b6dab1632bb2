"""Find runs: all of a workspace, or the one that a user refers to. No pydantic: the shell completes run names."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ftkit.errors import NotFoundError, PrerequisiteError, one_line
from ftkit.files import DamagedFileError, PrivateFileError
from ftkit.planning.layout import RunLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftkit.planning.layout import Workspace
    from ftkit.runs.job import SubmittedRun

_ID = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)-(?P<created>\d{8}T\d{6}Z)-(?P<suffix>[0-9a-f]+)")
_NUM_CANDIDATES_SHOWN = 8


@dataclass(frozen=True)
class RunFolder:
    """A run, known only by its folder's name."""

    layout: RunLayout
    name: str
    created: datetime
    suffix: str

    @property
    def id(self) -> str:
        """The run's id."""
        return self.layout.root.name

    @property
    def submitted(self) -> SubmittedRun | None:
        """The run with its newest submission; None if it was never submitted.

        Raises:
            DamagedFileError: the file can't be read.
        """
        from ftkit.runs.job import SubmittedRun, read_submission  # noqa: PLC0415 - pydantic

        submission = read_submission(self.layout)
        return SubmittedRun(self.layout, submission) if submission else None


def list_runs(workspace: Workspace) -> list[RunFolder]:
    """Return all runs, newest first. Other folders are skipped.

    Raises:
        PrerequisiteError: the workspace can't be used.
    """
    try:
        names = [entry.name for entry in workspace.runs.iterdir()]
    except FileNotFoundError:
        _check_creatable(workspace)
        return []
    except OSError as error:
        raise _unusable(workspace, one_line(error)) from error
    runs = [run for name in names if (run := _from_name(workspace, name))]
    return sorted(runs, key=lambda run: (run.created, run.id), reverse=True)


def _check_creatable(workspace: Workspace) -> None:
    """Check that the workspace's folder exists or can be created."""
    try:
        existing = next(folder for folder in (workspace.runs, *workspace.runs.parents) if folder.exists())
        is_usable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    except OSError as error:
        raise _unusable(workspace, one_line(error)) from error
    if not is_usable:
        raise _unusable(workspace, f"{existing} is not a folder with write permission for you")


def _unusable(workspace: Workspace, reason: str) -> PrerequisiteError:
    return PrerequisiteError(
        f"the workspace {workspace.root} can't be used: {reason}",
        meaning="the path is wrong, its file system is not mounted on this machine, or it belongs to another user",
        fix="'ftkit config' shows where it is set; set FTKIT_WORKSPACE, or 'workspace:' in ftkit.yaml",
    )


def _from_name(workspace: Workspace, name: str) -> RunFolder | None:
    parts = _ID.fullmatch(name)
    if parts is None:
        return None
    try:
        created = datetime.strptime(parts["created"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
    return RunFolder(RunLayout(workspace.runs / name), parts["name"], created, parts["suffix"])


def find_run(reference: str, workspace: Workspace) -> RunFolder:
    """Return the run that `reference` selects: `last`, a name, an id or its beginning or end, a job id, a folder.

    Raises:
        NotFoundError: there is none, or more than one.
        PrivateFileError: this user may not read it.
    """
    found = _select(reference, workspace)
    root, plan = found.layout.root, found.layout.plan
    if not os.access(root, os.R_OK | os.X_OK, effective_ids=True):
        raise PrivateFileError(root)
    if plan.exists() and not os.access(plan, os.R_OK, effective_ids=True):
        raise PrivateFileError(plan)
    return found


def _select(reference: str, workspace: Workspace) -> RunFolder:
    runs = list_runs(workspace)
    if not runs:
        raise NotFoundError(
            f"there are no runs in {workspace.root}",
            meaning="no run was started yet, or another workspace is set",
            fix="start one with 'ftkit run demo', or check the workspace with 'ftkit config'",
        )
    if reference == "last":
        return runs[0]
    wanted = reference.rstrip("/").rpartition("/")[2]
    named = [run for run in runs if wanted in (run.id, run.name)]
    if named:
        return named[0]
    by_job: Callable[[RunFolder], bool] = lambda run: wanted in _job_ids(run)  # noqa: E731
    for matches in (lambda run: run.suffix == wanted, by_job, lambda run: run.id.startswith(wanted)):
        found = [run for run in runs if matches(run)]
        if len(found) == 1:
            return found[0]
        if found:
            raise _ambiguous(reference, found)
    raise _unknown(reference, runs)


def _job_ids(run: RunFolder) -> tuple[str, ...]:
    """Return the ids of a run's jobs; none if the file with them is damaged."""
    try:
        submitted = run.submitted
    except DamagedFileError:
        return ()
    return (submitted.submission.job_id, *submitted.submission.earlier_job_ids) if submitted else ()


def _ambiguous(reference: str, found: Sequence[RunFolder]) -> NotFoundError:
    shown = ", ".join(run.id for run in found[:_NUM_CANDIDATES_SHOWN])
    more = len(found) - _NUM_CANDIDATES_SHOWN
    return NotFoundError(
        f"'{reference}' matches {len(found)} runs",
        meaning=shown + (f", and {more} more" if more > 0 else ""),
        fix="give the full id of one of them, or its name for the newest run of that name",
    )


def _unknown(reference: str, runs: Sequence[RunFolder]) -> NotFoundError:
    words = list(dict.fromkeys([*(run.name for run in runs), *(run.id for run in runs)]))
    close = difflib.get_close_matches(reference, words, n=3, cutoff=0.5)
    return NotFoundError(
        f"there is no run '{reference}'",
        meaning=f"closest: {', '.join(close)}" if close else "",
        fix="list all with 'ftkit runs'",
    )
