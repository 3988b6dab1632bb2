"""`ftkit runs` and `runs top`: list runs, and watch their GPUs."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Final

import click

from ftkit.cli import arguments
from ftkit.cli.commands import command
from ftkit.cli.forwarded import forwarded_command
from ftkit.cli.terminal.console import Cell, Styled, Terminal
from ftkit.cli.terminal.format import age, short_path
from ftkit.cli.terminal.run_table import show_runs
from ftkit.errors import NotFoundError
from ftkit.runs.find import RunFolder, list_runs
from ftkit.runs.gpu_samples import read_last_samples
from ftkit.runs.listing import read_entry

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
                time.sleep(2)


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
