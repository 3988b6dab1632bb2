"""`ftkit logs` and `cancel`: read and cancel the jobs of runs."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftkit.cli import arguments
from ftkit.cli.follow import poll_states
from ftkit.cli.forwarded import forwarded_command
from ftkit.cli.output import log_output
from ftkit.cli.terminal.console import Terminal
from ftkit.cli.terminal.format import short_path
from ftkit.cli.terminal.run_view import failed
from ftkit.errors import FtkitError, NotFoundError
from ftkit.files import copy_new, open_regular
from ftkit.launch.submission import cancel
from ftkit.runs.failure import explain_failure
from ftkit.runs.job import RunState, SubmittedRun

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout


@forwarded_command("logs", "ftkit logs last", "ftkit logs demo -f", "ftkit logs demo --rank 3 | less")
@arguments.run_argument
@click.option("--follow", "-f", is_flag=True, help="Print new lines until the run ends.")
@arguments.number_option("--rank", low=0, about="Print the log of this rank.")
@click.option("--from-byte", type=click.IntRange(min=0), default=0, hidden=True)  # after a lost connection
def logs_command(reference: str, *, follow: bool, rank: int | None, from_byte: int) -> None:
    """Print the log of a run's job, or of one of its ranks.

    {RUN} The id or the name of a sweep prints the logs of all of its runs.
    """
    if follow:
        run = arguments.get_submission(arguments.get_run(reference))
        _follow_log(run, _log_path(run.layout, rank), from_byte)
        return
    folders = arguments.get_run_or_sweep(reference)
    if len(folders) == 1:
        _print_log(folders[0].layout, rank)
        return
    for folder in folders:
        sys.stdout.write(f"==> {folder.id} <==\n")
        with suppress(NotFoundError):  # it may not have started yet
            _print_log(folder.layout, rank)


def _log_path(layout: RunLayout, rank: int | None) -> Path:
    return layout.job_log if rank is None else layout.rank_log(rank)


def _print_log(layout: RunLayout, rank: int | None) -> None:
    path = _log_path(layout, rank)
    try:
        with open_regular(path) as log:
            shutil.copyfileobj(log, log_output())
    except FileNotFoundError as error:
        there = ", ".join(sorted(file.name for file in layout.logs.glob("*.log")))
        raise NotFoundError(
            f"log {short_path(path)} not found",
            meaning=f"logs of this run: {there}" if there else "the run has not started yet",
            fix=f"see its state: ftkit status {layout.root.name}",
        ) from error


def _follow_log(run: SubmittedRun, path: Path, offset: int) -> None:
    """Copy a log to stdout until the run ends; wait for a log that does not exist yet."""
    terminal, output, shown = Terminal(), log_output(), ""
    for seen in poll_states(run):
        offset = copy_new(path, offset, output)
        if seen and not offset and str(seen) != shown:
            shown = str(seen)
            terminal.say(shown)
        if seen and seen.is_final and seen.state is not RunState.COMPLETED:
            raise failed(run, seen, explain_failure(run, seen))


@forwarded_command("cancel", "ftkit cancel last", "ftkit cancel demo", "ftkit cancel 123456")
@arguments.run_argument
def cancel_command(reference: str) -> None:
    """Cancel a run. Its files stay: 'ftkit resume' submits it again, to continue from its newest checkpoint.

    {RUN} The id or the name of a sweep cancels all of its runs that have not ended.
    """
    terminal = Terminal()
    runs: list[SubmittedRun] = []
    errors: list[FtkitError] = []
    for folder in reversed(arguments.get_run_or_sweep(reference)):  # the last one may wait for the end of the first
        try:
            runs.append(arguments.get_submission(folder))
        except FtkitError as error:
            errors.append(error)
    ended = cancel(runs)
    for run in runs:
        again = "continue" if run.layout.metrics.exists() else "submit"
        canceled = f"canceled {run.id}; to {again} it: ftkit resume {run.id}"
        terminal.say(f"{run.id} has already ended: {ended[run.id]}" if run.id in ended else canceled)
    for other in errors[1:]:
        terminal.warn(str(other))
    if errors:
        raise errors[0]
