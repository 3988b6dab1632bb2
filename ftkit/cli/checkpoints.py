"""`ftkit runs checkpoints`: list the checkpoints of a run, and verify them."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import RUN_HELP, get_run, json_option, run_argument
from ftkit.cli.commands import ForwardedCommand
from ftkit.cli.terminal.console import Cell, Column, Styled, Terminal
from ftkit.cli.terminal.format import age, gib, short_path
from ftkit.errors import TrainingError, plural

if TYPE_CHECKING:
    from pathlib import Path

_COLUMNS = (
    Column("STEP", is_number=True),
    Column("SIZE", is_number=True),
    Column("PROCESSES", is_number=True),
    Column("AGE", is_number=True),
    Column("STATE", can_shrink=True),
)


@dataclass(frozen=True)
class _Listed:
    step: int
    path: str
    size: int | None
    world_size: int | None
    written: float
    damage: list[str] | None
    """None if its files were not read."""
    best: str | None
    """Metric and value by which it is `RUN@best`; None for other checkpoints."""


@click.command(
    "checkpoints",
    cls=ForwardedCommand,
    short_help="List the checkpoints of a run, and verify them.",
    examples=(
        "ftkit runs checkpoints last",
        "ftkit runs checkpoints last --verify",
        "ftkit runs checkpoints last --json",
    ),
    help=f"""List the complete checkpoints of a run, oldest first. --verify reads all files and compares their digests,
    and exits with code 9 if one is damaged. A run continues from its newest undamaged checkpoint. The best one (by
    evaluation.best of the recipe, or else by validation loss) is RUN@best in other commands.

    {RUN_HELP}
    """,
)
@run_argument
@click.option("--verify", "does_verify", is_flag=True, help="Read all files and compare their digests.")
@json_option
def command(reference: str, *, does_verify: bool, as_json: bool) -> None:
    """List checkpoints."""
    from ftkit.runs.checkpoints import find_best

    terminal, layout = Terminal(), get_run(reference).layout
    try:
        folders, best = layout.list_checkpoints(), find_best(layout)
    except OSError as error:
        raise TrainingError(
            f"the checkpoints of this run can't be listed: {error}",
            meaning="you lack permission to read them, or the file system is not reachable",
        ) from error
    listed = []
    for step, folder in folders:
        if does_verify:
            terminal.say(f"reading {short_path(folder)}")
        reason = f"{best.metric} {best.value:.4g}" if best is not None and best.step == step else None
        listed.append(_read_checkpoint(step, folder, reason, does_verify=does_verify))
    if as_json:
        terminal.json([asdict(each) for each in listed])
    elif listed:
        terminal.table(_COLUMNS, [_cells(each) for each in listed])
    else:
        terminal.say(f"no checkpoints yet in {short_path(layout.checkpoints)}")
    damaged = [each for each in listed if each.damage]
    if damaged:
        raise TrainingError(
            f"{plural(len(damaged), 'checkpoint')} of {len(listed)} damaged: "
            + ", ".join(f"step {each.step}" for each in damaged),
            meaning="the file system lost data, or files were changed or removed",
            fix=f"do nothing if an undamaged one is left: 'ftkit resume {layout.root.name}' uses the newest of them",
        )


def _read_checkpoint(step: int, folder: Path, best: str | None, *, does_verify: bool) -> _Listed:
    from ftkit.runs.checkpoints import DamagedCheckpointError, find_damage, read_marker

    written = folder.stat().st_mtime
    try:
        marker = read_marker(folder, step)
    except DamagedCheckpointError as error:
        return _Listed(step, str(folder), None, None, written, [str(error)], best)
    damage = find_damage(folder, marker, sorted(marker.files)) if does_verify else None
    if not does_verify and (missing := [name for name in marker.files if not (folder / name).is_file()]):
        damage = missing
    return _Listed(step, str(folder), marker.size, marker.world_size, written, damage, best)


def _cells(listed: _Listed) -> list[Cell]:
    best = f", best ({listed.best})" if listed.best else ""
    state: Cell = f"complete{best}" if listed.damage is None else Styled(f"verified{best}", "green")
    if listed.damage:
        state = Styled(f"damaged: {', '.join(listed.damage)}{best}", "red")
    return [
        str(listed.step),
        "?" if listed.size is None else gib(listed.size / 2**30),
        str(listed.world_size or "?"),
        age(time.time() - listed.written),
        state,
    ]
