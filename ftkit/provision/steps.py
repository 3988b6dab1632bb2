"""Steps that create a cluster: files, checks and commands of the provider's own tools.

Pure: `gcp_slurm`, `soperator` and `gcp_vm` describe a cluster with them, and `execute` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftkit.errors import FtkitError, PrerequisiteError

if TYPE_CHECKING:
    from pathlib import Path

Command = tuple[str, ...]

FOLDER = "{folder}"
"""Placeholder for the folder of the cluster in a command."""


@dataclass(frozen=True)
class Check:
    """A condition that must hold before anything is created.

    Attributes:
        title: the condition.
        command: that checks it.
        problem: returns the problem in the command's output; None without one.
        advice: fix if it fails.
    """

    title: str
    command: Command
    advice: str
    problem: Callable[[str], str | None] = lambda _: None


@dataclass(frozen=True)
class Step:
    """A command that creates a resource.

    Attributes:
        id: unique in the cluster; the state file names it.
        title: the resource.
        command: that creates it.
        existing: prints something if it already exists: then it is neither created nor removed.
        undo: removes it; nothing if it stays, or is removed with another one.
        minutes: approximate duration.
        is_image: whether it creates the operating system's image, which can be kept for the next cluster.
    """

    id: str
    title: str
    command: Command
    existing: Command = ()
    undo: tuple[Command, ...] = ()
    minutes: int = 0
    is_image: bool = False


@dataclass(frozen=True)
class Provision:
    """A cluster to create.

    Attributes:
        name: of the cluster.
        kind: of the cluster.
        files: texts of the files that the commands read, by their path in the cluster's folder.
        checks: conditions before the first step.
        steps: created in order, removed in reverse order.
        status: commands that show the cluster.
        advice: fixes for failed commands, by a pattern of their output.
        cost: its known cost.
        next_steps: commands to type afterwards.
    """

    name: str
    kind: str
    files: Mapping[str, str]
    checks: tuple[Check, ...]
    steps: tuple[Step, ...]
    status: tuple[Command, ...]
    cost: str
    advice: Mapping[str, str] = field(default_factory=dict)
    next_steps: tuple[str, ...] = ()

    @property
    def minutes(self) -> int:
        """Approximate duration of all steps."""
        return sum(step.minutes for step in self.steps)


def placed(command: Command, folder: Path) -> Command:
    """Return a command with the folder of the cluster in its words."""
    return tuple(word.replace(FOLDER, str(folder)) for word in command)


class ProvisionError(FtkitError):
    """A command of the provider's tools failed."""

    exit_code = PrerequisiteError.exit_code
