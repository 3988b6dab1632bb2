"""`ftkit cancel`: cancel a run."""

from __future__ import annotations

import click

from ftkit.cli.arguments import RUN_HELP, get_submitted_run, run_argument
from ftkit.cli.commands import ForwardedCommand
from ftkit.cli.terminal.console import Terminal


@click.command(
    "cancel",
    cls=ForwardedCommand,
    short_help="Cancel a run.",
    examples=("ftkit cancel last", "ftkit cancel demo", "ftkit cancel 123456"),
    help=f"""Cancel a run. Its files stay: 'ftkit resume' continues from its newest checkpoint.

    {RUN_HELP}
    """,
)
@run_argument
def command(reference: str) -> None:
    """Cancel a run."""
    from ftkit.launch.jobs import cancel

    terminal = Terminal()
    run = get_submitted_run(reference)
    ended = cancel(run)
    if ended:
        terminal.say(f"{run.id} has already ended: {ended}")
    else:
        terminal.say(f"cancelled {run.id}; to continue from its newest checkpoint: ftkit resume {run.id}")
