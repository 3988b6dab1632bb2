"""The state file of a cluster with its created resources, written before and after each step."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ftkit.config.layers import COMMAND_LINE
from ftkit.errors import ConfigError, NotFoundError, Problem
from ftkit.files import read_json, write_json
from ftkit.provision.spec import Kind

_FILE = "state.json"


@dataclass(frozen=True)
class ProvisionState:
    """State of a cluster's creation.

    Attributes:
        kind: kind of the cluster.
        settings: the user's settings, with defaults.
        made: ids of the completed steps.
        found: ids of steps whose resource existed before; it stays when the cluster is destroyed.
        begun: id of a started but unfinished step, whose resource may exist in part.
        is_destroyed: whether all is removed except what other clusters use: this cluster itself uses nothing any more.
    """

    kind: Kind
    settings: dict[str, object]
    made: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    begun: str | None = None
    is_destroyed: bool = False


def clusters_folder() -> Path:
    """Return the folder of all clusters that were created from this account."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "ftkit" / "clusters"


def clusters_of_account(parent: Path) -> list[str]:
    """Return the names of all recorded clusters."""
    return sorted(path.parent.name for path in parent.glob(f"*/{_FILE}"))


def read_state(folder: Path) -> ProvisionState:
    """Read the state of a cluster.

    Raises:
        NotFoundError: no cluster was created under this name.
    """
    state = read_json(folder / _FILE, ProvisionState)
    if state is None:
        names = ", ".join(clusters_of_account(folder.parent))
        raise NotFoundError(
            f"no cluster '{folder.name}' was created from this account",
            meaning=f"these were: {names}" if names else f"none is recorded in {folder.parent}",
            fix="create it with: ftkit cluster create NAME --kind KIND",
        )
    return state


def begin_or_continue(folder: Path, new: ProvisionState) -> ProvisionState:
    """Return the state of an earlier start of the same creation, or a new state.

    Raises:
        ConfigError: the cluster was created with other settings.
    """
    before = read_json(folder / _FILE, ProvisionState)
    if before is None:
        return new
    changed = [key for key, value in new.settings.items() if before.settings.get(key) != value]
    if before.kind != new.kind:
        changed = ["kind"]
    if changed:
        raise ConfigError(
            [
                Problem(
                    COMMAND_LINE, ", ".join(changed), f"differs from what '{folder.name}' was created with.",
                    f"Use another name, or first run: ftkit cluster destroy {folder.name}",
                )
            ]
        )  # fmt: skip
    return before


def write_state(folder: Path, state: ProvisionState) -> None:
    """Write the state."""
    write_json(folder / _FILE, state)
