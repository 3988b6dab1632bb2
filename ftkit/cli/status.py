"""`ftkit status`: show the state and results of a run.

The shell completes runs with this module: it imports rich and pydantic only when the command runs.
"""

from __future__ import annotations

import click

from ftkit.cli.arguments import get_run, get_run_or_sweep, get_submission, get_sweep, json_option, run_argument
from ftkit.cli.forwarded import forwarded_command
from ftkit.errors import FtkitError, NoAnswerError, NotFoundError


@forwarded_command("status", "ftkit status last", "ftkit status demo --follow", "ftkit status 123456 --json")
@run_argument
@click.option("--follow", "-f", is_flag=True, help="Follow the run, or all of a sweep, until it ends.")
@json_option
def status_command(reference: str, *, follow: bool, as_json: bool) -> None:
    """Show a run: its state, progress, results, the error that ended it, and what to do next.

    {RUN} The id or the name of a sweep lists its runs.
    """
    from ftkit.cli.terminal.console import Terminal

    if follow:
        from ftkit.cli import follow as following

        first, *others = [get_submission(each) for each in get_run_or_sweep(reference)]
        if others:
            following.follow_sweep([first, *others], Terminal())
        else:
            following.follow(first, Terminal())
        return
    try:
        folder = get_run(reference)
    except NotFoundError:
        entries = get_sweep(reference)
        if not entries:
            raise
        from ftkit.cli.terminal.run_table import show_runs

        show_runs(entries, Terminal(), is_sweep=True, as_json=as_json)
        return
    from ftkit.cli.terminal.run_view import read_run_status, run_status_as_json, show_run_status

    try:
        get_submission(folder)
    except FtkitError as error:  # shown as damaged, or as never submitted
        if error.exit_code == NoAnswerError.exit_code:
            Terminal().warn(f"whether {folder.id} has a job is unknown: {error.what}")
    except OSError:
        pass
    status = read_run_status(folder)
    if as_json:
        Terminal().json(run_status_as_json(status))
    else:
        show_run_status(status, Terminal())
