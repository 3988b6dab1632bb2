"""A table of runs, and its values as JSON."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftkit.cli.terminal.console import Cell, Styled, Terminal
from ftkit.cli.terminal.format import age
from ftkit.cli.terminal.run_view import STATE_STYLES
from ftkit.launch.job_states import observe_all
from ftkit.runs.job import Job
from ftkit.runs.listing import RunEntry
from ftkit.runs.metrics_file import find_damage, read_last_step
from ftkit.runs.records import StepRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

_TAIL_BYTES = 4_096
"""Number of bytes at the end of metrics.jsonl in which a listing looks for damaged lines: it must be fast."""
_TITLES = ("NAME…", "ID", "STATE", "#STEP", "#LOSS", "CLUSTER…", "#JOB", "#AGE")


@dataclass(frozen=True)
class _Row:
    """A run in the table; `metrics_problem` says which of its newest records can't be read, and why."""

    entry: RunEntry
    seen: Job
    step: StepRecord | None
    metrics_problem: str

    @property
    def num_steps(self) -> int | None:
        if self.step:
            return self.step.num_steps
        return self.entry.plan.num_steps if self.entry.plan else None

    @property
    def values(self) -> dict[str, str]:
        return self.entry.plan.sweep.values if self.entry.plan and self.entry.plan.sweep else {}


def show_runs(entries: Sequence[RunEntry], terminal: Terminal, *, as_json: bool, is_sweep: bool = False) -> None:
    rows = _rows(entries, terminal)
    if as_json:
        terminal.json([_as_json(row) for row in rows])
        return
    keys = list(dict.fromkeys(key for row in rows for key in row.values if key != "cluster")) if is_sweep else []
    own = [f"{key.rpartition('.')[2].upper()}…" for key in keys]
    is_roomy = terminal.is_roomy and not is_sweep
    cells = []
    for row in rows:
        name, id_, *others = _cells(row, is_roomy=is_roomy)
        cells.append([name, id_, *(row.values.get(key, "-") for key in keys), *others])
    terminal.table((*_TITLES[:2], *own, *_TITLES[2:]), cells)


def _rows(entries: Sequence[RunEntry], terminal: Terminal) -> list[_Row]:
    """Read the states of runs, with one query per scheduler; warn about runs that can't be read."""
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
    folder, plan, step = row.entry.folder, row.entry.plan, row.step
    return [
        folder.name,
        folder.id if is_roomy else folder.suffix,
        Styled(row.seen.state, STATE_STYLES[row.seen.state]),
        f"{step.step if step else '?' if row.metrics_problem else 0}/{row.num_steps or '?'}",
        f"{step.loss:.4f}" if step else "?" if row.metrics_problem else "-",
        plan.cluster.name if plan else "?",
        row.entry.run.job_id if row.entry.run else "-",
        age(time.time() - folder.created.timestamp()),
    ]


def _as_json(row: _Row) -> dict[str, object]:
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
        "job_id": row.entry.run.job_id if row.entry.run else None,
        "sweep": plan.sweep.id if plan and plan.sweep else None,
        "values": row.values,
        "created": folder.created.isoformat(),
        "age_seconds": round(time.time() - folder.created.timestamp()),
        "folder": str(folder.layout.root),
    }
