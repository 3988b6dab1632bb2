"""Runs in listings: some values of the plan, and the newest submission."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.config.image_reference import image_file
from ftkit.files import DamagedFileError, PrivateFileError, read_json
from ftkit.runs.find import RunFolder, list_runs
from ftkit.runs.job import SchedulerName, SubmittedRun, read_submitted
from ftkit.runs.records import Count
from ftkit.spec import Name

if TYPE_CHECKING:
    from ftkit.planning.layout import Workspace


@dataclass(frozen=True)
class ClusterEntry:
    name: Name
    scheduler: SchedulerName


@dataclass(frozen=True)
class SweepEntry:
    id: str
    name: str
    values: dict[str, str]


@dataclass(frozen=True)
class PlanEntry:
    """The values of a plan that a listing shows."""

    cluster: ClusterEntry
    container_image: str | None
    num_steps: Count | None = None  # None also for a script
    sweep: SweepEntry | None = None
    fingerprint: str | None = None  # of its prepared data; None for a script

    @property
    def image_file(self) -> Path | None:
        """The image file of the run's container; None if it is not a file."""
        return image_file(self.container_image)


@dataclass(frozen=True)
class RunEntry:
    """A run according to its own files."""

    folder: RunFolder
    plan: PlanEntry | None
    run: SubmittedRun | None
    damage: str  # why the files can't be read
    is_private: bool = False  # the only problem is that this user may not read them

    @property
    def sweep(self) -> SweepEntry | None:
        return self.plan.sweep if self.plan else None


def read_entry(folder: RunFolder) -> RunEntry:
    """Read a run for a listing. Damage is recorded, not raised."""
    plan, run, damages, is_private = None, None, [], False
    try:
        plan = read_json(folder.layout.plan, PlanEntry)
        damages += [] if plan else ["plan.json is missing"]
    except DamagedFileError as error:
        damages.append(error.what)
        is_private = isinstance(error, PrivateFileError)
    try:
        run = read_submitted(folder.layout)
    except DamagedFileError as error:
        damages += [] if is_private else [error.what]
    return RunEntry(folder, plan, run, "; ".join(damages), is_private=is_private)


def find_sweep(reference: str, workspace: Workspace) -> list[RunEntry]:
    """Return a sweep's runs in order. A name selects the newest sweep of that name; empty if there is no such sweep."""
    entries = [read_entry(folder) for folder in list_runs(workspace)]  # the newest first
    sweeps = [entry.sweep for entry in entries if entry.sweep]
    newest = next((each.id for each in sweeps if reference in (each.id, each.name)), None)
    found = [entry for entry in entries if entry.sweep and entry.sweep.id == newest]
    return sorted(found, key=lambda entry: (len(entry.folder.name), entry.folder.name))
