"""`ftkit gc`: remove images that nothing uses anymore."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import current_workspace, json_option
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.image_arguments import image_store
from ftkit.cli.terminal.console import Column, Terminal
from ftkit.cli.terminal.format import gib

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.launch.observe import Overview
    from ftkit.planning.layout import Workspace
    from ftkit.runs.entry import RunEntry


@click.command(
    "gc",
    cls=ExamplesCommand,
    short_help="Remove unused images.",
    examples=("ftkit gc", "ftkit gc --dry-run", "ftkit gc --yes"),
)
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@click.option("--yes", is_flag=True, help="Remove without asking.")
@json_option
def command(*, dry_run: bool, yes: bool, as_json: bool) -> None:
    """List images that nothing uses anymore, and remove them after asking.

    These are imported files that no name and no unfinished run refers to, leftovers of killed imports, and older
    builds in the docker engine. With --json, nothing is removed without --yes.
    """
    from ftkit.images.gc import find_removable, remove_all

    terminal, workspace = Terminal(), current_workspace()
    removables = find_removable(image_store(workspace), _in_use(workspace))
    if as_json:
        terminal.json([{"name": item.name, "bytes": item.size, "reason": item.reason} for item in removables])
    elif removables:
        terminal.table(
            (Column("IMAGE"), Column("SIZE", is_number=True), Column("WHY", can_shrink=True)),
            [(item.name, gib(item.size / 2**30), item.reason) for item in removables],
        )
    if not removables:
        terminal.say("nothing to remove")
        return
    if dry_run or (as_json and not yes):
        return
    if not yes and not click.confirm("Remove all of them?", err=True):
        terminal.say("removed nothing")
        return
    # An upper bound: images of the docker engine share layers.
    terminal.say(f"removed; this frees up to {gib(remove_all(removables) / 2**30)}")


def _in_use(workspace: Workspace) -> list[Path]:
    """Return the image files of runs that may still train, which includes damaged runs."""
    from ftkit.launch.observe import observe_all
    from ftkit.runs.entry import read_entry
    from ftkit.runs.find import list_runs

    entries = [read_entry(folder) for folder in list_runs(workspace)]
    overview = observe_all([entry.run for entry in entries if entry.run])
    active = [entry.plan for entry in entries if entry.damage or not _has_ended(entry, overview)]
    return [plan.image_file for plan in active if plan and plan.image_file]


def _has_ended(entry: RunEntry, overview: Overview) -> bool:
    return entry.run is None or overview.state_of(entry).is_final
