"""What a listing shows of a run: the values of its plan and its newest submission."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftkit.config.image_reference import image_file
from ftkit.config.strict import Name
from ftkit.files import DamagedFileError, read_json
from ftkit.runs.find import RunFolder
from ftkit.runs.records import Count
from ftkit.runs.submission import SchedulerName, SubmittedRun

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class ClusterEntry:
    """The values of a cluster that a listing shows."""

    name: Name
    scheduler: SchedulerName


@dataclass(frozen=True)
class PlanEntry:
    """The values of a plan that a listing shows."""

    cluster: ClusterEntry
    num_steps: Count | None
    container_image: str | None

    @property
    def image_file(self) -> Path | None:
        """The image file of the run's container; None if it is not a file."""
        return image_file(self.container_image)


@dataclass(frozen=True)
class RunEntry:
    """What a run's own files say; `damage` describes what is wrong with them."""

    folder: RunFolder
    plan: PlanEntry | None
    run: SubmittedRun | None
    damage: str


def read_entry(folder: RunFolder) -> RunEntry:
    """Read what a listing needs of a run. Damage is listed, not raised."""
    plan, run, damages = None, None, []
    try:
        plan = read_json(folder.layout.plan, PlanEntry)
        damages += [] if plan else ["plan.json is not there"]
    except DamagedFileError as error:
        damages.append(error.what)
    try:
        run = folder.submitted
    except DamagedFileError as error:
        damages.append(error.what)
    return RunEntry(folder, plan, run, "; ".join(damages))
