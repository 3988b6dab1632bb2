"""`ftkit runs top`: show the load of all GPUs of a run."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import click

from ftkit.cli.arguments import RUN_HELP, get_run, json_option, run_argument
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Column, Styled, Terminal
from ftkit.cli.terminal.format import age, finite

if TYPE_CHECKING:
    from ftkit.cli.terminal.console import Cell
    from ftkit.runs.find import RunFolder
    from ftkit.runs.gpu_samples import NodeSample

_REFRESH_SECONDS: Final = 2.0
_OLD_SECONDS: Final = 60.0
_COLUMNS: Final = (
    Column("NODE", can_shrink=True),
    Column("GPU", is_number=True),
    Column("BUSY", is_number=True),
    Column("MEMORY", is_number=True),
    Column("POWER", is_number=True),
    Column("TEMP", is_number=True),
    Column("CLOCK", is_number=True),
    Column("LIMITED BY", can_shrink=True),
)


@click.command(
    "top",
    cls=ExamplesCommand,
    short_help="Show the load of all GPUs of a run.",
    examples=("ftkit runs top last --once", "ftkit runs top last --json"),
    help=f"""Show all GPUs of a run, live: utilization, memory, power, temperature, clocks, and what limits them.

    A sampler on each node writes these every 10 seconds. In a pipe, one snapshot is printed. {RUN_HELP}
    """,
)
@run_argument
@click.option("--once", is_flag=True, help="Print one snapshot.")
@json_option
def command(reference: str, *, once: bool, as_json: bool) -> None:
    """Show the GPUs of a run."""
    from ftkit.runs.gpu_samples import read_last_samples

    terminal, folder = Terminal(), get_run(reference)
    if as_json:
        terminal.json(finite([asdict(sample) for sample in read_last_samples(folder.layout)]))
        return
    if once or not terminal.is_screen:
        _show(folder, read_last_samples(folder.layout), terminal)
        return
    with terminal.full_screen() as redraw:
        while True:
            redraw(lambda: _show(folder, read_last_samples(folder.layout), terminal))
            time.sleep(_REFRESH_SECONDS)


def _show(folder: RunFolder, samples: list[NodeSample], terminal: Terminal) -> None:
    if not samples:
        terminal.say(f"{folder.id} has no GPU samples: it has not started, or trains on CPUs")
        return
    rows: list[list[Cell]] = []
    for sample in samples:
        is_old = time.time() - sample.time > _OLD_SECONDS
        for gpu in sample.gpus:
            busy = gpu.utilization if gpu.sm_activity is None else gpu.sm_activity
            numbers = ((busy, "%"), (gpu.memory_gib, " GiB"), (gpu.power, " W"), (gpu.temperature, " °C"))
            cells = ["-" if value is None else f"{value:.0f}{unit}" for value, unit in (*numbers, (gpu.clock, " MHz"))]
            old = (f"sampled {age(time.time() - sample.time)} ago",) if is_old else ()
            rows.append([sample.host, str(gpu.index), *cells, Styled(", ".join((*old, *gpu.throttle)), "yellow")])
    terminal.table(_COLUMNS, rows)
