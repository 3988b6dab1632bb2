"""`ftkit runs`, `logs`, `cancel` and `runs top`: list runs; read and cancel their jobs; watch their GPUs."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ftkit.cli import arguments
from ftkit.cli.commands import command
from ftkit.cli.forwarded import forwarded_command
from ftkit.cli.output import log_output
from ftkit.cli.terminal.console import Cell, Styled, Terminal
from ftkit.cli.terminal.format import age, short_path
from ftkit.cli.terminal.run_table import show_runs
from ftkit.cli.terminal.run_view import failed
from ftkit.errors import FtkitError, NotFoundError
from ftkit.files import copy_new, open_regular
from ftkit.launch.submission import cancel
from ftkit.runs.failure import explain_failure
from ftkit.runs.find import RunFolder, list_runs
from ftkit.runs.gpu_samples import read_last_samples
from ftkit.runs.job import RunState, SubmittedRun
from ftkit.runs.listing import read_entry

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout

_REFRESH_SECONDS: Final = 2.0
_OLD_SECONDS: Final = 60.0


@forwarded_command("list", "ftkit runs", "ftkit runs | grep running", "ftkit runs --json | jq -r '.[0].id'")
@click.argument("sweep", required=False, metavar="[SWEEP]")
@arguments.json_option
def list_command(sweep: str | None, *, as_json: bool) -> None:
    """List the runs of the workspace, newest first; or the runs of a sweep, with their values."""
    terminal, workspace = Terminal(), arguments.current_workspace()
    entries = arguments.get_sweep(sweep) if sweep else [read_entry(folder) for folder in list_runs(workspace)]
    if entries or (as_json and not sweep):
        show_runs(entries, terminal, is_sweep=sweep is not None, as_json=as_json)
    elif sweep:
        raise NotFoundError(
            f"sweep '{sweep}' not found",
            meaning="'ftkit run' makes a sweep if a key has several values: training.learning_rate=1e-5,3e-5",
            fix="list all runs with 'ftkit runs'",
        )
    else:
        terminal.say(f"no runs yet in {short_path(workspace.root)}: start one with 'ftkit run demo'")


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
    from ftkit.cli.follow import poll_states

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
    errors: list[FtkitError] = []
    for folder in arguments.get_run_or_sweep(reference):
        try:
            ended = cancel(arguments.get_submission(folder))
        except FtkitError as error:
            errors.append(error)
            continue
        again = "continue" if folder.layout.metrics.exists() else "submit"
        canceled = f"canceled {folder.id}; to {again} it: ftkit resume {folder.id}"
        terminal.say(f"{folder.id} has already ended: {ended}" if ended else canceled)
    for other in errors[1:]:
        terminal.warn(str(other))
    if errors:
        raise errors[0]


@command("top", "ftkit runs top last --once", "ftkit runs top last --json")
@arguments.run_argument
@click.option("--once", is_flag=True, help="Print one snapshot.")
@arguments.json_option
def top_command(reference: str, *, once: bool, as_json: bool) -> None:
    """Show all GPUs of a run, live: utilization, memory, power, temperature, clocks, and what limits them.

    A sampler on each node writes these every 10 seconds. In a pipe, one snapshot is printed. {RUN}
    """
    terminal, folder = Terminal(), arguments.get_run(reference)
    if as_json:
        terminal.json([asdict(sample) for sample in read_last_samples(folder.layout)])
    elif once or not terminal.is_screen:
        _show_gpus(folder, terminal)
    else:
        with terminal.full_screen() as clear:
            while True:
                clear()
                _show_gpus(folder, terminal)
                time.sleep(_REFRESH_SECONDS)


def _show_gpus(folder: RunFolder, terminal: Terminal) -> None:
    samples = read_last_samples(folder.layout)
    if not samples:
        terminal.say(f"{folder.id} has no GPU samples: it has not started, or trains on CPUs")
        return
    rows: list[list[Cell]] = []
    for sample in samples:
        since = time.time() - sample.time
        old = (f"sampled {age(since)} ago",) if since > _OLD_SECONDS else ()
        for gpu in sample.gpus:
            busy = gpu.utilization if gpu.sm_activity is None else gpu.sm_activity
            numbers = (busy, gpu.memory_gib, gpu.power, gpu.temperature, gpu.clock)
            units = ("%", " GiB", " W", " °C", " MHz")
            cells = ["-" if value is None else f"{value:.0f}{unit}" for value, unit in zip(numbers, units, strict=True)]
            rows.append([sample.host, str(gpu.index), *cells, Styled(", ".join((*old, *gpu.throttle)), "yellow")])
    terminal.table(("NODE…", "#GPU", "#BUSY", "#MEMORY", "#POWER", "#TEMP", "#CLOCK", "LIMITED BY…"), rows)
