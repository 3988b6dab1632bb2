"""`ftkit logs`: print the log of a run."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import RUN_HELP, get_run_or_sweep, get_submitted_run, run_argument
from ftkit.cli.commands import ForwardedCommand
from ftkit.cli.output import log_output
from ftkit.cli.terminal.console import Terminal
from ftkit.cli.terminal.format import short_path
from ftkit.errors import NotFoundError

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.planning.layout import RunLayout
    from ftkit.runs.submission import SubmittedRun


@click.command(
    "logs",
    cls=ForwardedCommand,
    short_help="Print the log of a run.",
    examples=("ftkit logs last", "ftkit logs demo -f", "ftkit logs demo --rank 3 | less"),
    help=f"""Print the log of a run's job, or of one of its ranks.

    {RUN_HELP} The id or the name of a sweep prints the logs of all of its runs.
    """,
)
@run_argument
@click.option("--follow", "-f", is_flag=True, help="Print new lines until the run ends.")
@click.option("--rank", metavar="N", type=click.IntRange(min=0), help="Print the log of this rank.")
@click.option("--from-byte", type=click.IntRange(min=0), default=0, hidden=True)  # after a lost connection
def command(reference: str, *, follow: bool, rank: int | None, from_byte: int) -> None:
    """Print a log."""
    if follow:
        run = get_submitted_run(reference)
        _follow(run, _path(run.layout, rank), from_byte)
        return
    folders = get_run_or_sweep(reference)
    if len(folders) == 1:
        _print(folders[0].layout, rank)
        return
    for folder in folders:
        sys.stdout.write(f"==> {folder.id} <==\n")
        with suppress(NotFoundError):  # it may not have started yet
            _print(folder.layout, rank)


def _print(layout: RunLayout, rank: int | None) -> None:
    from ftkit.files import open_regular

    path = _path(layout, rank)
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


def _path(layout: RunLayout, rank: int | None) -> Path:
    return layout.job_log if rank is None else layout.rank_log(rank)


def _follow(run: SubmittedRun, path: Path, offset: int) -> None:
    """Copy a log to stdout until the run ends; wait for a log that does not exist yet."""
    from ftkit.cli.follow import poll_states
    from ftkit.cli.terminal.report import failed
    from ftkit.files import copy_new
    from ftkit.runs.failure import explain_failure
    from ftkit.runs.states import RunState

    terminal, output = Terminal(), log_output()
    shown = ""
    for seen in poll_states(run):
        offset = copy_new(path, offset, output)
        if seen and not offset and str(seen) != shown:
            shown = str(seen)
            terminal.say(shown)
        if seen and seen.is_final and seen.state is not RunState.COMPLETED:
            raise failed(run, seen, explain_failure(run, seen))
