"""`ftkit runs`: all runs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ftkit.cli.arguments import current_workspace, json_option
from ftkit.cli.closing import STATE_STYLES
from ftkit.cli.lazy_group import ExamplesCommand
from ftkit.cli.terminal import Cell, Column, Styled, Terminal
from ftkit.cli.wording import age
from ftkit.launch.observe import observe_all
from ftkit.launch.runs import PlanGlance, RunFolder, glance_at_plan, list_runs
from ftkit.launch.states import Observation, RunState
from ftkit.records import StepRecord, read_last_step

if TYPE_CHECKING:
    from ftkit.launch.submission import SubmittedRun

_COLUMNS = (
    Column("NAME", takes_cut=True),
    Column("ID"),
    Column("STATE"),
    Column("STEP", is_number=True),
    Column("LOSS", is_number=True),
    Column("CLUSTER", takes_cut=True),
    Column("JOB", is_number=True),
    Column("AGE", is_number=True),
)


@dataclass(frozen=True)
class _Row:
    folder: RunFolder
    plan: PlanGlance
    job_id: str | None
    seen: Observation
    step: StepRecord | None


@click.command(
    "runs",
    cls=ExamplesCommand,
    short_help="List all runs, newest first.",
    examples=("ftkit runs", "ftkit runs | grep running", "ftkit runs --json | jq -r '.[0].id'"),
)
@json_option
def command(*, as_json: bool) -> None:
    """List all runs of the workspace, newest first."""
    terminal = Terminal()
    rows = _read(terminal)
    if as_json:
        terminal.json([_as_json(row) for row in rows])
    elif rows:
        terminal.table(_COLUMNS, [_cells(row, is_roomy=terminal.is_roomy) for row in rows])
    else:
        terminal.say("no runs yet: start one with 'ftkit run demo'")


def _read(terminal: Terminal) -> list[_Row]:
    """Read all runs, with one question to each scheduler; warn of folders that are damaged."""
    whole: list[tuple[RunFolder, PlanGlance, SubmittedRun | None]] = []
    for folder in list_runs(current_workspace()):
        plan = glance_at_plan(folder.layout)
        if plan is None:
            terminal.warn(f"passed over {folder.layout.root}: its plan.json can't be read")
        else:
            whole.append((folder, plan, folder.submitted))
    overview = observe_all([run for _, _, run in whole if run])
    for warning in overview.warnings:
        terminal.warn(warning)
    never = Observation(RunState.UNKNOWN, is_final=False, reason="never submitted")
    return [
        _Row(
            folder,
            plan,
            run.submission.job_id if run else None,
            overview.states.get(folder.id, never),
            read_last_step(folder.layout.metrics),
        )
        for folder, plan, run in whole
    ]


def _cells(row: _Row, *, is_roomy: bool) -> list[Cell]:
    num_steps = row.plan.num_steps if row.step is None else row.step.num_steps
    return [
        row.folder.name,
        row.folder.id if is_roomy else row.folder.suffix,
        Styled(row.seen.state, STATE_STYLES[row.seen.state]),
        f"{row.step.step if row.step else 0}/{num_steps or '?'}",
        f"{row.step.loss:.4f}" if row.step else "-",
        row.plan.cluster,
        row.job_id or "-",
        age(time.time() - row.folder.created.timestamp()),
    ]


def _as_json(row: _Row) -> dict[str, Any]:
    step = row.step
    return {
        "name": row.folder.name,
        "id": row.folder.id,
        "state": row.seen.state,
        "is_final": row.seen.is_final,
        "reason": row.seen.reason,
        "step": step.step if step else 0,
        "num_steps": step.num_steps if step else row.plan.num_steps,
        "loss": step.loss if step and math.isfinite(step.loss) else None,
        "cluster": row.plan.cluster,
        "scheduler": row.plan.scheduler,
        "job_id": row.job_id,
        "created": row.folder.created.isoformat(),
        "age_seconds": round(time.time() - row.folder.created.timestamp()),
        "folder": str(row.folder.layout.root),
    }
