"""The common part of all plans, for ftkit's trainer (`RunPlan`) and for a user's script (`ScriptPlan`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ftkit.config.cluster import ClusterProfile
from ftkit.config.image_reference import image_file
from ftkit.planning.layout import RunLayout, Workspace

if TYPE_CHECKING:
    from ftkit.config.recipe import ResourcesSpec


@dataclass(frozen=True)
class PlacementPlan:
    """Placement of the processes: `num_nodes` x `processes_per_node`, one process per GPU."""

    num_nodes: int
    processes_per_node: int
    device: Literal["cpu", "cuda"]
    threads_per_process: int

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.num_nodes * self.processes_per_node


@dataclass(frozen=True)
class CodePlan:
    """A copy of a folder of code in the run's folder, first on PYTHONPATH.

    Attributes:
        name: name of the copy, in the run's `code`.
        source: folder that it was copied from.
        import_from: folder within the copy that is on PYTHONPATH.
        sha256: digest of the names and contents of its files.
        commit: commit of the git checkout that contains the folder; null if there is none.
        has_uncommitted_changes: whether the checkout differed from its commit.
    """

    name: str
    source: str
    import_from: str
    sha256: str
    commit: str | None
    has_uncommitted_changes: bool


@dataclass(frozen=True, kw_only=True)
class JobPlan(ABC):
    """The plan of a run for scheduler, runtime and run folder. Frozen, and written to plan.json unchanged."""

    version: Literal[2]
    """Of the plan's fields and their meaning; a plan with another version is refused."""
    ftkit_version: str
    id: str
    name: str
    created: datetime
    workspace: Path
    cluster: ClusterProfile
    placement: PlacementPlan
    image: str | None
    container_image: str | None
    python: str
    notes: tuple[str, ...]
    code: tuple[CodePlan, ...] = ()

    @property
    @abstractmethod
    def resources(self) -> ResourcesSpec:
        """Resources that the run requests from the scheduler."""

    @property
    def layout(self) -> RunLayout:
        """The run's folder."""
        return RunLayout(Workspace(self.workspace).runs / self.id)

    @property
    def image_file(self) -> Path | None:
        """The image's file; None without a container, or if the runtime gets an address or a docker engine's name."""
        return image_file(self.container_image)

    @property
    def python_path(self) -> tuple[Path, ...]:
        """Folders of the run's copies of code, for PYTHONPATH."""
        return tuple(self.layout.code / code.name / code.import_from for code in self.code)

    @property
    def has_preflight(self) -> bool:
        """Whether the nodes are checked before the run starts."""
        setting, place = self.resources.preflight, self.placement
        return place.num_nodes > 1 and place.device == "cuda" if setting is None else setting

    def cost_of(self, seconds: float) -> float | None:
        """Return the cost of all GPUs for this time, in the profile's currency; None on CPUs, or for no known price."""
        price = self.cluster.price_per_gpu_hour
        if price is None or self.placement.device == "cpu":
            return None
        return price * self.placement.world_size * seconds / 3600
