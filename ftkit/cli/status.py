"""`ftkit status`: show the state and results of a run."""

from __future__ import annotations

from contextlib import suppress

import click

from ftkit.cli.arguments import (
    RUN_HELP,
    current_workspace,
    get_run,
    get_submission,
    get_submitted_run,
    json_option,
    run_argument,
)
from ftkit.cli.forwarded import ForwardedCommand
from ftkit.cli.terminal.console import Terminal
from ftkit.errors import FtkitError, NotFoundError


@click.command(
    "status",
    cls=ForwardedCommand,
    examples=("ftkit status last", "ftkit status demo --follow", "ftkit status 123456 --json"),
    help=f"""Show a run: its state, progress, results, the error that ended it, and what to do next.

    {RUN_HELP} The id or the name of a sweep lists its runs.
    """,
)
@run_argument
@click.option("--follow", "-f", is_flag=True, help="Follow the run until it ends.")
@json_option
def command(reference: str, *, follow: bool, as_json: bool) -> None:
    """Show a run."""
    terminal = Terminal()
    if follow:
        from ftkit.cli.follow import follow as follow_run

        follow_run(get_submitted_run(reference), terminal)
        return
    try:
        folder = get_run(reference)
    except NotFoundError:
        from ftkit.runs.listing import find_sweep

        if not find_sweep(reference, current_workspace()):
            raise
        from ftkit.cli.runs import show_sweep

        show_sweep(reference, terminal, as_json=as_json)
        return
    from ftkit.cli.terminal.status_view import read_run_status, run_status_as_json, show_run_status

    with suppress(FtkitError, OSError):  # shown as damaged, or as never submitted
        get_submission(folder)
    status = read_run_status(folder)
    if as_json:
        terminal.json(run_status_as_json(status))
    else:
        show_run_status(status, terminal)
