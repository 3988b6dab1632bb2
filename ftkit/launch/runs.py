"""All runs of a workspace, and the one that a user means."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ftkit.errors import NotFoundError
from ftkit.launch.json_files import read_json
from ftkit.launch.submission import Submission, SubmittedRun, read_submission
from ftkit.layout import RunLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftkit.layout import Workspace

_ID = re.compile(r"(?P<name>.+)-(?P<created>\d{8}T\d{6}Z)-(?P<suffix>[0-9a-f]+)")
_NUM_CANDIDATES_SHOWN = 8


@dataclass(frozen=True)
class RunFolder:
    """A run as its folder's name tells it, without opening a file."""

    layout: RunLayout
    name: str
    created: datetime
    suffix: str

    @property
    def id(self) -> str:
        """The run's id."""
        return self.layout.root.name

    @property
    def submission(self) -> Submission | None:
        """The newest submission; None if there never was one."""
        return read_submission(self.layout)

    @property
    def submitted(self) -> SubmittedRun | None:
        """The run with its newest submission."""
        submission = self.submission
        return SubmittedRun(self.layout, submission) if submission else None


@dataclass(frozen=True)
class PlanGlance:
    """The few values of a plan that a listing shows."""

    cluster: str
    scheduler: str
    num_steps: int | None


def list_runs(workspace: Workspace) -> list[RunFolder]:
    """Return all runs, newest first. What is no run's folder is passed over."""
    try:
        names = [entry.name for entry in workspace.runs.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    runs = [run for name in names if (run := _from_name(workspace, name))]
    return sorted(runs, key=lambda run: (run.created, run.id), reverse=True)


def _from_name(workspace: Workspace, name: str) -> RunFolder | None:
    parts = _ID.fullmatch(name)
    if parts is None or name.startswith("."):
        return None
    try:
        created = datetime.strptime(parts["created"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
    return RunFolder(RunLayout(workspace.runs / name), parts["name"], created, parts["suffix"])


def glance_at_plan(layout: RunLayout) -> PlanGlance | None:
    """Read what a listing needs of a plan, without checking the rest; None if it can't be read."""
    plan = read_json(layout.plan)
    try:
        cluster = plan["cluster"] if plan else {}
        return PlanGlance(str(cluster["name"]), str(cluster["scheduler"]), plan["num_steps"] if plan else None)
    except (KeyError, TypeError):
        return None


def find_run(reference: str, workspace: Workspace) -> RunFolder:
    """Return the run that `reference` means: `last`, a name, an id or its beginning or end, a job id, a folder.

    Raises:
        NotFoundError: there is none, or more than one.
    """
    runs = list_runs(workspace)
    if not runs:
        raise NotFoundError(
            f"there are no runs in {workspace.root}",
            meaning="no run was started yet, or the workspace is another one",
            fix="start one with 'ftkit run demo', or see with 'ftkit config' which workspace is used",
        )
    if reference == "last":
        return runs[0]
    wanted = reference.rstrip("/").rpartition("/")[2]
    named = [run for run in runs if wanted in (run.id, run.name)]
    if named:
        return named[0]
    by_job: Callable[[RunFolder], bool] = lambda run: wanted in _job_ids(run)  # noqa: E731
    for fits in (lambda run: run.suffix == wanted, by_job, lambda run: run.id.startswith(wanted)):
        found = [run for run in runs if fits(run)]
        if len(found) == 1:
            return found[0]
        if found:
            raise _ambiguous(reference, found)
    raise _unknown(reference, runs)


def _job_ids(run: RunFolder) -> tuple[str, ...]:
    submission = run.submission
    return (submission.job_id, *submission.earlier_job_ids) if submission else ()


def _ambiguous(reference: str, found: Sequence[RunFolder]) -> NotFoundError:
    shown = ", ".join(run.id for run in found[:_NUM_CANDIDATES_SHOWN])
    more = len(found) - _NUM_CANDIDATES_SHOWN
    return NotFoundError(
        f"'{reference}' fits {len(found)} runs",
        meaning=shown + (f", and {more} more" if more > 0 else ""),
        fix="give the whole id of one of them, or its name for the newest of that name",
    )


def _unknown(reference: str, runs: Sequence[RunFolder]) -> NotFoundError:
    words = list(dict.fromkeys([*(run.name for run in runs), *(run.id for run in runs)]))
    close = difflib.get_close_matches(reference, words, n=3, cutoff=0.5)
    return NotFoundError(
        f"there is no run '{reference}'",
        meaning=f"closest: {', '.join(close)}" if close else "",
        fix="list all with 'ftkit runs'",
    )
