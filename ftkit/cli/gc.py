"""`ftkit gc`: remove images that nothing uses any more."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import current_workspace
from ftkit.cli.image_arguments import image_store
from ftkit.cli.lazy_group import ExamplesCommand
from ftkit.cli.terminal import Column, Terminal
from ftkit.cli.wording import gib
from ftkit.images.gc import find_removable, remove_all
from ftkit.launch.json_files import read_json
from ftkit.launch.observe import observe_all
from ftkit.launch.runs import list_runs

if TYPE_CHECKING:
    from ftkit.layout import Workspace


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
    """Return the image files of runs that have not ended."""
    submitted = [run for folder in list_runs(workspace) if (run := folder.submitted)]
    states = observe_all(submitted).states if submitted else {}
    active = [run for run in submitted if run.id not in states or not states[run.id].is_final]
    files = [(read_json(run.layout.plan) or {}).get("container_image") for run in active]
    return [Path(file) for file in files if isinstance(file, str) and file.startswith("/")]
