"""Parts of job scripts that the project overrides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit.launch.templates import find_overrides

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.cli.terminal.console import Terminal


def say_overridden(terminal: Terminal, project: Path) -> None:
    """Name the parts of job scripts that the project overrides, before a script is printed or submitted."""
    for name in find_overrides(project):
        terminal.say(f"sbatch/{name} of this project overrides the shipped part")
