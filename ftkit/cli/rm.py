"""`ftkit rm`: remove runs, or what nothing uses anymore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import RUN_HELP, complete_run, current_workspace, get_run, image_store, json_option
from ftkit.cli.commands import ForwardedCommand
from ftkit.cli.terminal.console import Cell, Column, Terminal
from ftkit.cli.terminal.format import gib, short_path
from ftkit.errors import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ftkit.launch.job_states import Overview
    from ftkit.planning.layout import Workspace
    from ftkit.runs.entry import RunEntry


@click.command(
    "rm",
    cls=ForwardedCommand,
    short_help="Remove runs, or what nothing uses.",
    examples=("ftkit rm demo --yes", "ftkit rm --unused", "ftkit rm --unused --dry-run"),
    help=f"""Remove runs with their checkpoints, exports, logs and metrics, after asking. Fails if a run may still be
    training. Prepared data and images stay, since other runs may use them.

    --unused lists what the workspace no longer needs, and removes it after asking: runs that failed or were canceled
    before their first checkpoint, prepared data that no run uses and that is older than 24 hours, imported images that
    no name and no unfinished run refers to, leftovers of killed imports, and older builds in the docker engine.
    With --json, nothing is removed without --yes.

    {RUN_HELP}
    """,
)
@click.argument("references", metavar="[RUN]...", nargs=-1, shell_complete=complete_run)
@click.option("--unused", is_flag=True, help="Remove failed runs, and data and images that nothing uses.")
@click.option("--with-checkpoints", is_flag=True, help="With --unused: also failed runs that could be resumed.")
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@click.option("--yes", is_flag=True, help="Remove without asking.")
@json_option
def command(
    references: tuple[str, ...], *, unused: bool, with_checkpoints: bool, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Remove runs, or what nothing uses."""
    if bool(references) == unused:
        raise click.UsageError("give the runs to remove, or --unused", click.get_current_context())
    terminal = Terminal()
    found, remove = _find_unused(terminal, with_checkpoints=with_checkpoints) if unused else _runs(references, terminal)
    if as_json:
        terminal.json([{"kind": each.kind, "name": each.name, "bytes": each.size, "reason": each.reason}
                       for each in found])  # fmt: skip
    elif found and unused:
        columns = (Column("WHAT"), Column("NAME", can_shrink=True), Column("SIZE", is_number=True),
                   Column("WHY", can_shrink=True))  # fmt: skip
        terminal.table(columns, [(each.kind, each.name, gib(each.size / 2**30), each.reason) for each in found])
    if not found:
        terminal.say("nothing to remove")
        return
    if dry_run or (as_json and not yes):
        return
    question = f"Remove {plural(len(found), 'item')}?" if len(found) > 1 else "Remove it?"
    if not yes and not click.confirm(question, err=True):
        terminal.say("removed nothing")
        return
    freed = gib(remove() / 2**30)
    # An upper bound: images of the docker engine share layers.
    terminal.say(
        f"removed; this frees up to {freed}" if unused else f"removed {', '.join(each.name for each in found)}"
    )


@dataclass(frozen=True)
class _Item:
    kind: str
    name: str
    size: int
    reason: str


def _runs(references: Sequence[str], terminal: Terminal) -> tuple[list[_Item], Callable[[], int]]:
    from ftkit.launch.jobs import check_removable, remove_run
    from ftkit.launch.prune import folder_bytes

    items, folders = [], list({folder.id: folder for folder in map(get_run, references)}.values())
    for folder in folders:
        check_removable(folder)
        layout, size = folder.layout, folder_bytes(folder.layout.root)
        facts: list[tuple[str, Cell]] = [
            ("run", folder.id),
            ("run folder", f"{short_path(layout.root)}, {gib(size / 2**30)}"),
        ]
        if layout.export.is_dir():
            facts.append(("export", f"{short_path(layout.export)} is also removed"))
        terminal.facts(facts, is_data=False)
        items.append(_Item("run", folder.id, size, ""))

    def remove() -> int:
        for folder in folders:
            remove_run(folder)
        return sum(each.size for each in items)

    return items, remove


def _find_unused(terminal: Terminal, *, with_checkpoints: bool) -> tuple[list[_Item], Callable[[], int]]:
    from ftkit.images.status import find_removable, remove_all
    from ftkit.launch.prune import find_prunable, prune

    workspace = current_workspace()
    found = find_prunable(workspace, with_checkpoints=with_checkpoints)
    for warning in found.warnings:
        terminal.warn(warning)
    images = find_removable(image_store(workspace), _image_files_in_use(workspace))
    items = [_Item(each.kind, each.path.name, each.size_bytes, each.reason) for each in found.items]
    items += [_Item("image", each.name, each.size, each.reason) for each in images]
    return items, lambda: remove_all(images) + prune(found.items)


def _image_files_in_use(workspace: Workspace) -> list[Path]:
    """Return the image files of runs that may still train, which includes damaged runs."""
    from ftkit.launch.job_states import observe_all
    from ftkit.runs.entry import read_entry
    from ftkit.runs.find import list_runs

    entries = [read_entry(folder) for folder in list_runs(workspace)]
    overview = observe_all([entry.run for entry in entries if entry.run])
    active = [entry.plan for entry in entries if entry.damage or not _has_ended(entry, overview)]
    return [plan.image_file for plan in active if plan and plan.image_file]


def _has_ended(entry: RunEntry, overview: Overview) -> bool:
    return entry.run is None or overview.state_of(entry).is_final
