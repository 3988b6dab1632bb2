"""`ftkit cancel`: cancel a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import RUN_HELP, get_run_or_sweep, get_submission, run_argument
from ftkit.cli.commands import ForwardedCommand
from ftkit.cli.terminal.console import Terminal
from ftkit.errors import FtkitError

if TYPE_CHECKING:
    from ftkit.runs.job import SubmittedRun


@click.command(
    "cancel",
    cls=ForwardedCommand,
    short_help="Cancel a run, or all runs of a sweep.",
    examples=("ftkit cancel last", "ftkit cancel demo", "ftkit cancel 123456"),
    help=f"""Cancel a run. Its files stay: 'ftkit resume' submits it again, to continue from its newest checkpoint.

    {RUN_HELP} The id or the name of a sweep cancels all of its runs that have not ended.
    """,
)
@run_argument
def command(reference: str) -> None:
    """Cancel runs. If one can't be canceled, cancel the others anyway."""
    terminal = Terminal()
    errors: list[FtkitError] = []
    for folder in get_run_or_sweep(reference):
        try:
            _cancel(get_submission(folder), terminal)
        except FtkitError as error:
            errors.append(error)
    for other in errors[1:]:
        terminal.warn(str(other))
    if errors:
        raise errors[0]


def _cancel(run: SubmittedRun, terminal: Terminal) -> None:
    from ftkit.launch.jobs import cancel

    ended = cancel(run)
    if ended:
        terminal.say(f"{run.id} has already ended: {ended}")
    else:
        again = "continue" if run.layout.metrics.exists() else "submit"
        terminal.say(f"canceled {run.id}; to {again} it: ftkit resume {run.id}")
