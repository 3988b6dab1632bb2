"""What making a cluster consists of: files, checks and commands of the provider's own tools.

Pure: `gcp_slurm`, `soperator` and `gcp_vm` describe a cluster so, and `execute` runs it.
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
"""Stands for the folder of the cluster in the words of a command."""


@dataclass(frozen=True)
class Check:
    """Something that must be true before anything is made.

    Attributes:
        title: what is checked.
        command: what tells.
        problem: says what is wrong with the command's output; None if nothing is.
        advice: what to do if it fails.
    """

    title: str
    command: Command
    advice: str
    problem: Callable[[str], str | None] = lambda _: None


@dataclass(frozen=True)
class Step:
    """A command that makes something.

    Attributes:
        id: unique in the cluster; the state file names it.
        title: what is made.
        command: what makes it.
        existing: prints something if it is there already: then it is neither made nor removed.
        undo: what removes it; nothing if it stays, or goes with another one.
        minutes: how long it takes, about.
        is_image: whether it makes the operating system's image, which can be kept for the next cluster.
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
    """A cluster as it is made.

    Attributes:
        name: of the cluster.
        kind: what kind it is.
        files: texts of the files that the commands read, by their path in the cluster's folder.
        checks: what must be true first.
        steps: what is made, in order; removed in reverse order.
        status: commands that show the cluster.
        advice: what to do when a command fails, by a pattern of its output.
        cost: what it costs, as far as that is known.
        next_steps: what to type then.
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
        """How long all steps take, about."""
        return sum(step.minutes for step in self.steps)


def placed(command: Command, folder: Path) -> Command:
    """Return a command with the folder of the cluster in its words."""
    return tuple(word.replace(FOLDER, str(folder)) for word in command)


class ProvisionError(FtkitError):
    """A command of the provider's tools failed."""

    exit_code = PrerequisiteError.exit_code
