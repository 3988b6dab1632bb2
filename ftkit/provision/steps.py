"""Steps that create a cluster: files, checks and commands of the provider's own tools.

Pure: `gcp_slurm`, `soperator` and `gcp_vm` describe a cluster with them, and `execute` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
        command: the command that checks it.
        advice: the fix if it fails.
        problem: returns the problem in the command's output; None if there is none.
    """

    title: str
    command: Command
    advice: str
    problem: Callable[[str], str | None] = lambda _: None


@dataclass(frozen=True)
class Step:
    """A command that creates a resource.

    Attributes:
        id: unique in the cluster; it is recorded in the state file.
        title: the resource.
        command: the command that creates it.
        existing: a command that prints something if it already exists: then it is neither created nor removed.
        undo: commands that remove it; none if it stays, or is removed with another one. Clusters whose commands are
            equal share the resource.
        users: commands that print what else uses it, one per line: then it is not removed.
        minutes: approximate duration.
        is_image: whether it creates the operating system's image, which can be kept for the next cluster.
    """

    id: str
    title: str
    command: Command
    existing: Command = ()
    undo: tuple[Command, ...] = ()
    users: tuple[Command, ...] = ()
    minutes: int = 0
    is_image: bool = False


@dataclass(frozen=True)
class Provision:
    """A cluster to create.

    Attributes:
        name: name of the cluster.
        kind: kind of the cluster.
        files: content of the files that the commands read, by their path in the cluster's folder.
        checks: conditions before the first step.
        steps: steps whose resources are created in order, and removed in reverse order.
        status: commands that show the cluster.
        advice: fixes for failed commands, by a pattern in their output.
        cost: its known cost.
        next_steps: commands to type next.
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


ACCOUNT_CHECK = Check(
    "a Google Cloud account is active",
    ("gcloud", "auth", "list", "--filter=status:ACTIVE", "--format=value(account)"),
    "log in with: gcloud auth login",
    lambda output: None if output.strip() else "none is",
)
OUT_OF_STOCK = "ZONE_RESOURCE_POOL_EXHAUSTED|does not have enough resources"
OUT_OF_QUOTA = "Quota .* exceeded|QUOTA_EXCEEDED"
"""Patterns in the output of failed commands, as of all clusters on Google Cloud."""
