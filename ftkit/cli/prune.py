"""`ftkit prune`: remove failed runs, and prepared data that no run uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import current_workspace, json_option
from ftkit.cli.commands import ForwardedCommand
from ftkit.cli.terminal.console import Column, Terminal
from ftkit.cli.terminal.format import gib
from ftkit.errors import plural

if TYPE_CHECKING:
    from ftkit.launch.prune import Prunable


@click.command(
    "prune",
    cls=ForwardedCommand,
    short_help="Remove failed runs and unused prepared data.",
    examples=("ftkit prune", "ftkit prune --dry-run", "ftkit prune --with-checkpoints --yes"),
)
@click.option("--with-checkpoints", is_flag=True, help="Also remove failed runs that could be resumed.")
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@click.option("--yes", is_flag=True, help="Remove without asking.")
@json_option
def command(*, with_checkpoints: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    """List what the workspace no longer needs, and remove it after asking.

    These are runs that failed or were canceled before their first checkpoint, and unused prepared data. Data
    prepared in the last 24 hours is kept. With --json, nothing is removed without --yes.
    """
    from ftkit.launch.prune import find_prunable, prune

    terminal = Terminal()
    found = find_prunable(current_workspace(), with_checkpoints=with_checkpoints)
    for warning in found.warnings:
        terminal.warn(warning)
    if as_json:
        terminal.json([_as_json(item) for item in found.items])
    elif found.items:
        columns = (Column("WHAT"), Column("NAME", can_shrink=True), Column("SIZE", is_number=True), Column("WHY"))
        rows = [(each.kind, each.path.name, gib(each.size_bytes / 2**30), each.reason) for each in found.items]
        terminal.table(columns, rows)
    if not found.items:
        terminal.say("nothing to remove")
        return
    if dry_run or (as_json and not yes):
        return
    if not yes and not click.confirm(f"Remove {plural(len(found.items), 'folder')}?", err=True):
        terminal.say("removed nothing")
        return
    terminal.say(f"removed; this frees {gib(prune(found.items) / 2**30)}")


def _as_json(item: Prunable) -> dict[str, object]:
    return {"kind": item.kind, "path": str(item.path), "bytes": item.size_bytes, "reason": item.reason}
