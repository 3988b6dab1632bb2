"""Faults of processes and files, which work wherever a run trains."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from chaos.runs import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from random import Random

    from chaos.runs import Run

AWAY = "run folder unreachable"
PHASES = ("begun", "data", "index", "marker", "complete")
"""Of a save: started; data, index or marker written; just completed."""


def kill(pids: Iterable[int]) -> None:
    """Kill processes that have not ended yet."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_rank(run: Run, chance: Random) -> None:
    """Kill a rank at random."""
    ranks = wait_for(run, run.ranks)
    kill([ranks[chance.choice(sorted(ranks))]])


def kill_all_ranks(run: Run, _: Random) -> None:
    """Kill all ranks at once."""
    kill(run.ranks().values())


def die_while_saving(phase: str, run: Run, _: Random) -> None:
    """Kill all ranks in a phase of a save."""
    before, ranks = set(run.checkpoints()), run.ranks().values()

    def has_come() -> bool:
        for partial_save in (run.folder / "checkpoints").glob(".step-*.partial"):
            files = {path.name for path in partial_save.glob("*")}  # none if it has just got its final name
            wanted = {"index": ".metadata", "marker": "COMPLETE.json"}
            if phase == "begun" or (phase == "data" and files) or wanted.get(phase) in files:
                return True
        return bool(set(run.checkpoints()) - before)  # too late for the other phases

    while not has_come() and not run.is_over():
        time.sleep(0.001)  # a phase takes milliseconds
    kill(ranks)


def damage_checkpoint(how: str, run: Run, chance: Random) -> None:
    """Damage a file of the newest checkpoint, and kill a rank, so that the run would load it.

    There is an older one: without it, a run ends, rather than start again from step 0.
    """
    wait_for(run, lambda: len(run.checkpoints()) > 1 or run.is_over())
    path = chance.choice(sorted(each for each in run.checkpoints()[-1].iterdir() if each.stat().st_size))
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    if how == "truncate":
        path.write_bytes(content[:place])
    else:
        content[place] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
    kill_rank(run, chance)


@contextmanager
def unreachable(folder: Path) -> Iterator[None]:
    """Replace a folder by a file, so that even root can neither read nor create anything in it."""
    hidden = folder.with_name(f".{folder.name}.hidden")
    folder.rename(hidden)
    folder.touch()
    try:
        yield
    finally:
        folder.unlink()
        hidden.rename(folder)


def hide_checkpoints(run: Run, _: Random) -> None:
    """Make the checkpoint folder unreachable until a save has failed."""
    checkpoints, failed = run.folder / "checkpoints", len(run.records("failed_checkpoint"))
    wait_for(run, checkpoints.is_dir)
    with unreachable(checkpoints):
        wait_for(run, lambda: len(run.records("failed_checkpoint")) > failed or run.is_over())


def hide_folder(longest: float, run: Run, _: Random) -> None:
    """Make the run's folder unreachable for some seconds, but at most for half of the remaining steps."""
    seconds = min(longest, run.seconds_for_steps(run.num_steps - run.step()) / 2)
    with unreachable(run.folder):
        time.sleep(seconds)


FAULTS: dict[str, Callable[[Run, Random], None]] = {
    "kill -9 of a rank": kill_rank,
    "kill -9 of all ranks": kill_all_ranks,
    **{f"death in a save: {phase}": partial(die_while_saving, phase) for phase in PHASES},
    "checkpoint truncated": partial(damage_checkpoint, "truncate"),
    "bit of a checkpoint flipped": partial(damage_checkpoint, "flip"),
    "checkpoints can't be written": hide_checkpoints,
    AWAY: partial(hide_folder, 30.0),
}
