"""`ftkit runs`: list runs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ftkit.cli.arguments import current_workspace, json_option
from ftkit.cli.forwarded import ForwardedCommand
from ftkit.cli.terminal.console import Cell, Column, Styled, Terminal
from ftkit.cli.terminal.format import age, short_path
from ftkit.errors import NotFoundError

if TYPE_CHECKING:
    from ftkit.runs.job import Job  # noqa: TC004
    from ftkit.runs.listing import RunEntry  # noqa: TC004 - no pydantic reads this dataclass
    from ftkit.runs.records import StepRecord  # noqa: TC004

_TAIL_BYTES = 4_096
"""Number of bytes at the end of metrics.jsonl in which a listing looks for damaged lines: it must be fast."""
_COLUMNS = (
    Column("NAME", can_shrink=True),
    Column("ID"),
    Column("STATE"),
    Column("STEP", is_number=True),
    Column("LOSS", is_number=True),
    Column("CLUSTER", can_shrink=True),
    Column("JOB", is_number=True),
    Column("AGE", is_number=True),
)


@dataclass(frozen=True)
class _Row:
    entry: RunEntry
    seen: Job
    step: StepRecord | None
    metrics_problem: str
    """Which of the newest records can't be read, and why; empty if all can."""

    @property
    def num_steps(self) -> int | None:
        if self.step:
            return self.step.num_steps
        return self.entry.plan.num_steps if self.entry.plan else None

    @property
    def values(self) -> dict[str, str]:
        return self.entry.plan.sweep.values if self.entry.plan and self.entry.plan.sweep else {}

    @property
    def job_id(self) -> str | None:
        return self.entry.run.job_id if self.entry.run else None


@click.command(
    "list",
    cls=ForwardedCommand,
    short_help="List runs, newest first.",
    examples=("ftkit runs", "ftkit runs | grep running", "ftkit runs --json | jq -r '.[0].id'"),
)
@click.argument("sweep", required=False, metavar="[SWEEP]")
@json_option
def command(sweep: str | None, *, as_json: bool) -> None:
    """List the runs of the workspace, newest first; or the runs of a sweep, with their values."""
    from ftkit.runs.find import list_runs
    from ftkit.runs.listing import read_entry

    terminal, workspace = Terminal(), current_workspace()
    if sweep:
        show_sweep(sweep, terminal, as_json=as_json)
        return
    rows = _rows([read_entry(folder) for folder in list_runs(workspace)], terminal)
    if as_json:
        terminal.json([_as_json(row) for row in rows])
    elif rows:
        terminal.table(_COLUMNS, [_cells(row, is_roomy=terminal.is_roomy) for row in rows])
    else:
        terminal.say(f"no runs yet in {short_path(workspace.root)}: start one with 'ftkit run demo'")


def show_sweep(reference: str, terminal: Terminal, *, as_json: bool) -> None:
    """List the runs of a sweep in the order of their values.

    Raises:
        NotFoundError: there is no such sweep.
    """
    from ftkit.runs.listing import find_sweep

    entries = find_sweep(reference, current_workspace())
    if not entries:
        raise NotFoundError(
            f"sweep '{reference}' not found",
            meaning="'ftkit run' makes a sweep if a key has several values: training.learning_rate=1e-5,3e-5",
            fix="list all runs with 'ftkit runs'",
        )
    rows = _rows(entries, terminal)
    if as_json:
        terminal.json([_as_json(row) for row in rows])
        return
    keys = list(dict.fromkeys(key for row in rows for key in row.values if key != "cluster"))  # it has a column
    own = [Column(key.rpartition(".")[2].upper(), can_shrink=True) for key in keys]
    cells = [[*row_cells[:2], *(row.values.get(key, "-") for key in keys), *row_cells[2:]]
             for row in rows for row_cells in [_cells(row, is_roomy=False)]]  # fmt: skip
    terminal.table((*_COLUMNS[:2], *own, *_COLUMNS[2:]), cells)


def _rows(entries: list[RunEntry], terminal: Terminal) -> list[_Row]:
    """Read the states of runs, with one query per scheduler; warn about runs that can't be read."""
    from ftkit.launch.job_states import observe_all
    from ftkit.runs.metrics_file import find_damage, read_last_step

    overview = observe_all([entry.run for entry in entries if entry.run])
    damaged = [
        f"{entry.folder.id} is {overview.state_of(entry).state}: {entry.damage}" for entry in entries if entry.damage
    ]
    rows = []
    for entry in entries:
        metrics = entry.folder.layout.metrics
        problem = "" if entry.is_private else find_damage(metrics, tail_bytes=_TAIL_BYTES)
        damaged += [f"{entry.folder.id}: {problem}"] if problem else []
        rows.append(_Row(entry, overview.state_of(entry), read_last_step(metrics), problem))
    for warning in (*overview.warnings, *damaged):
        terminal.warn(warning)
    return rows


def _cells(row: _Row, *, is_roomy: bool) -> list[Cell]:
    from ftkit.cli.terminal.report import STATE_STYLES

    folder, plan = row.entry.folder, row.entry.plan
    return [
        folder.name,
        folder.id if is_roomy else folder.suffix,
        Styled(row.seen.state, STATE_STYLES[row.seen.state]),
        f"{row.step.step if row.step else '?' if row.metrics_problem else 0}/{row.num_steps or '?'}",
        f"{row.step.loss:.4f}" if row.step else "?" if row.metrics_problem else "-",
        plan.cluster.name if plan else "?",
        row.job_id or "-",
        age(time.time() - folder.created.timestamp()),
    ]


def _as_json(row: _Row) -> dict[str, Any]:
    step, folder, plan = row.step, row.entry.folder, row.entry.plan
    return {
        "name": folder.name,
        "id": folder.id,
        "state": row.seen.state,
        "is_final": row.seen.is_final,
        "reason": row.seen.reason,
        "step": step.step if step else None if row.metrics_problem else 0,
        "num_steps": row.num_steps,
        "loss": step.loss if step and math.isfinite(step.loss) else None,
        "metrics_problem": row.metrics_problem or None,
        "cluster": plan.cluster.name if plan else None,
        "scheduler": plan.cluster.scheduler if plan else None,
        "job_id": row.job_id,
        "sweep": plan.sweep.id if plan and plan.sweep else None,
        "values": row.values,
        "created": folder.created.isoformat(),
        "age_seconds": round(time.time() - folder.created.timestamp()),
        "folder": str(folder.layout.root),
    }
