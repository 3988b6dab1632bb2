"""`ftkit cancel`: end a run."""

from __future__ import annotations

import click

from ftkit.cli.arguments import RUN_HELP, get_submitted_run, run_argument
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Terminal
from ftkit.cli.terminal.follow_views import format_state
from ftkit.launch.jobs import cancel


@click.command(
    "cancel",
    cls=ExamplesCommand,
    short_help="End a run.",
    examples=("ftkit cancel last", "ftkit cancel demo", "ftkit cancel 123456"),
    help=f"""End a run. What it wrote stays: 'ftkit resume' goes on from its newest checkpoint.

    {RUN_HELP}
    """,
)
@run_argument
def command(reference: str) -> None:
    """End a run."""
    terminal = Terminal()
    run = get_submitted_run(reference)
    ended = cancel(run)
    if ended:
        terminal.say(f"{run.id} had ended already: {format_state(ended)}")
    else:
        terminal.say(f"cancelled {run.id}; to go on from its newest checkpoint: ftkit resume {run.id}")
