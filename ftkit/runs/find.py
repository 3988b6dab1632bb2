"""Find all runs of a workspace, or one by reference. Imports no pydantic, because shell completion must be fast."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from ftkit.errors import NotFoundError, PrerequisiteError, first_few, one_line
from ftkit.files import PrivateFileError, load_json, read_small
from ftkit.planning.layout import RunLayout, Workspace

RUN_ID = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)-(?P<created>\d{8}T\d{6}Z)-(?P<suffix>[0-9a-f]+)")


class RunFolder(NamedTuple):
    """A run, known only by its folder's name."""

    layout: RunLayout
    name: str
    created: datetime
    suffix: str

    @property
    def id(self) -> str:
        return self.layout.root.name


def list_runs(workspace: Workspace) -> list[RunFolder]:
    """Return all runs, newest first. Other folders are skipped."""
    problem, runs = "", []
    try:
        existing = next(folder for folder in (workspace.runs, *workspace.runs.parents) if folder.exists())
        if existing == workspace.runs:
            names = [entry.name for entry in workspace.runs.iterdir()]
            runs = [run for name in names if (run := _from_name(workspace, name))]
        elif not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
            problem = f"{existing} is not a folder with write permission for you"
    except OSError as error:
        problem = one_line(error)
    if problem:
        raise PrerequisiteError(
            f"the workspace {workspace.root} can't be used: {problem}",
            meaning="the path is wrong, its file system is not mounted on this machine, or it belongs to another user",
            fix="'ftkit config' shows where it is set; set FTKIT_WORKSPACE, or 'workspace:' in ftkit.yaml",
        )
    return sorted(runs, key=lambda run: (run.created, run.id), reverse=True)


def _from_name(workspace: Workspace, name: str) -> RunFolder | None:
    parts = RUN_ID.fullmatch(name)
    if parts is None:
        return None
    try:
        created = datetime.strptime(parts["created"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
    return RunFolder(RunLayout(workspace.runs / name), parts["name"], created, parts["suffix"])


def find_run(reference: str, workspace: Workspace) -> RunFolder:
    """Return a run by `last`, name, id or part of it, job id, or folder. Raises NotFoundError or PrivateFileError."""
    is_folder = "/" in reference and os.path.isdir(reference)  # noqa: PTH112 - False for impossible paths
    if is_folder and Path(reference).resolve().parent != workspace.runs.resolve():
        raise NotFoundError(
            f"{reference} is not among the runs of this workspace, {workspace.runs}",
            meaning="a run's plan contains its paths, so a folder that was copied or moved can't be used",
            fix="give the original run; copies by 'ftkit runs sync RUN DEST' need 'ftkit resume RUN --from DEST'",
        )
    found = _select(reference, list_runs(workspace), workspace)
    root, plan = found.layout.root, found.layout.plan
    if not os.access(root, os.R_OK | os.X_OK, effective_ids=True):
        raise PrivateFileError(root)
    if plan.exists() and not os.access(plan, os.R_OK, effective_ids=True):
        raise PrivateFileError(plan)
    return found


def _select(reference: str, runs: list[RunFolder], workspace: Workspace) -> RunFolder:
    if not runs:
        raise NotFoundError(
            f"there are no runs in {workspace.root}",
            meaning="no run was started yet, or another workspace is set",
            fix="start one with 'ftkit run demo', or check the workspace with 'ftkit config'",
        )
    if reference == "last":
        return runs[0]
    wanted = reference.rstrip("/").rpartition("/")[2]
    if named := [run for run in runs if wanted in (run.id, run.name)]:
        return named[0]
    by_job: Callable[[RunFolder], bool] = lambda run: wanted in _job_ids(run.layout)  # noqa: E731
    for matches in (lambda run: run.suffix == wanted, by_job, lambda run: run.id.startswith(wanted)):
        found = [run for run in runs if matches(run)]
        if len(found) == 1:
            return found[0]
        if found:
            raise NotFoundError(
                f"'{reference}' matches {len(found)} runs",
                meaning=first_few([run.id for run in found]),
                fix="give the full id of one of them, or its name for the newest run of that name",
            )
    words = list(dict.fromkeys([*(run.name for run in runs), *(run.id for run in runs)]))
    close = difflib.get_close_matches(reference, words, n=3, cutoff=0.5)
    raise NotFoundError(
        f"there is no run '{reference}'",
        meaning=f"closest: {', '.join(close)}" if close else "",
        fix="list all with 'ftkit runs'",
    )


def _job_ids(layout: RunLayout) -> set[str]:
    """Return the ids of a run's jobs; empty if the file with them is damaged."""
    try:
        submission = load_json(read_small(layout.submission))
        return {submission["job_id"], *submission.get("earlier_job_ids", ())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
