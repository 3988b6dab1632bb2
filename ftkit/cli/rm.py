"""`ftkit rm`: remove a run's folder."""

from __future__ import annotations

import click

from ftkit.cli.arguments import RUN_HELP, get_run, run_argument
from ftkit.cli.commands import ForwardedCommand
from ftkit.cli.terminal.console import Cell, Terminal
from ftkit.cli.terminal.format import gib, short_path


@click.command(
    "rm",
    cls=ForwardedCommand,
    short_help="Remove a run's folder.",
    examples=("ftkit rm demo --yes",),
    help=f"""Remove a run's folder with its checkpoints, export, logs and metrics, after asking. Fails if the run may
    still be training. Prepared data and images stay, since other runs may use them.

    {RUN_HELP}
    """,
)
@run_argument
@click.option("--yes", is_flag=True, help="Remove without asking.")
def command(reference: str, *, yes: bool) -> None:
    """Remove a run."""
    from ftkit.launch.jobs import check_removable, remove_run
    from ftkit.launch.prune import folder_bytes

    terminal, folder = Terminal(), get_run(reference)
    check_removable(folder)
    layout = folder.layout
    facts: list[tuple[str, Cell]] = [
        ("run", folder.id),
        ("run folder", f"{short_path(layout.root)}, {gib(folder_bytes(layout.root) / 2**30)}"),
    ]
    if layout.export.is_dir():
        facts.append(("export", f"{short_path(layout.export)} is also removed"))
    terminal.facts(facts, is_data=False)
    if not yes and not click.confirm("Remove it?", err=True):
        terminal.say("removed nothing")
        return
    remove_run(folder)
    terminal.say(f"removed {folder.id}")
