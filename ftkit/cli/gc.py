"""`ftkit gc`: remove images that nothing uses any more."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import current_workspace
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.image_arguments import image_store
from ftkit.cli.terminal.console import Column, Terminal
from ftkit.cli.terminal.format import gib
from ftkit.images.gc import find_removable, remove_all
from ftkit.launch.observe import observe_all
from ftkit.runs.find import list_runs, read_entry

if TYPE_CHECKING:
    from ftkit.launch.observe import Overview
    from ftkit.planning.layout import Workspace
    from ftkit.runs.find import RunEntry


@click.command(
    "gc",
    cls=ExamplesCommand,
    short_help="Remove images that nothing uses any more.",
    examples=("ftkit gc", "ftkit gc --dry-run", "ftkit gc --yes"),
)
@click.option("--dry-run", is_flag=True, help="Only list what may go.")
@click.option("--yes", is_flag=True, help="Don't ask.")
def command(*, dry_run: bool, yes: bool) -> None:
    """List what nothing uses any more, and remove it after asking.

    That is: imported files that no name and no unfinished run points at, what killed imports left, and older
    builds in the docker engine.
    """
    terminal, workspace = Terminal(), current_workspace()
    removables = find_removable(image_store(workspace), _in_use(workspace))
    if not removables:
        terminal.say("nothing to remove")
        return
    terminal.table(
        (Column("IMAGE"), Column("SIZE", is_number=True), Column("WHY", takes_cut=True)),
        [(item.name, gib(item.size / 2**30), item.reason) for item in removables],
    )
    if dry_run:
        return
    if not yes and not click.confirm("Remove all of them?", err=True):
        terminal.say("nothing was removed")
        return
    # Not more exactly: images of the engine share layers.
    terminal.say(f"removed: up to {gib(remove_all(removables) / 2**30)} are free again")


def _in_use(workspace: Workspace) -> list[Path]:
    """Return the image files of runs that have not ended, as far as can be told: damaged ones may go on."""
    entries = [read_entry(folder) for folder in list_runs(workspace)]
    overview = observe_all([entry.run for entry in entries if entry.run])
    active = [entry.plan for entry in entries if entry.damage or not _has_ended(entry, overview)]
    files = [plan.container_image for plan in active if plan and plan.container_image]
    return [Path(file) for file in files if file.startswith("/")]


def _has_ended(entry: RunEntry, overview: Overview) -> bool:
    return entry.run is None or overview.state_of(entry).is_final
