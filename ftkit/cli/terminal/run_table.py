"""A table of runs, and its values as JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ftkit.cli.terminal.console import Cell, Styled, Terminal
from ftkit.cli.terminal.format import age
from ftkit.launch.job_states import observe_all
from ftkit.runs.job import FAILURES, RunState
from ftkit.runs.metrics_file import read_last_step, scan_records
from ftkit.runs.script_log import read_script_step

if TYPE_CHECKING:
    from ftkit.runs.job import Job
    from ftkit.runs.listing import RunEntry
    from ftkit.runs.records import ScriptStepRecord, StepRecord

STATE_STYLES = {
    RunState.COMPLETED: "green",
    RunState.RUNNING: "cyan",
    RunState.PENDING: "yellow",
    RunState.STOPPED: "yellow",
    RunState.CANCELED: "yellow",
    RunState.UNKNOWN: "dim",
    RunState.DAMAGED: "red",
    RunState.UNREADABLE: "dim",
    **dict.fromkeys(FAILURES, "red"),
}
_TAIL_BYTES = 4_096
"""Number of bytes at the end of metrics.jsonl in which a listing looks for damaged lines: it must be fast."""
_TITLES = ("NAME…", "ID", "STATE", "#STEP", "#LOSS", "CLUSTER…", "#JOB", "#AGE")


def show_runs(entries: Sequence[RunEntry], terminal: Terminal, *, as_json: bool, is_sweep: bool = False) -> None:
    """Read the states of runs, with one query per scheduler, and show them; warn about runs that can't be read."""
    overview = observe_all([entry.run for entry in entries if entry.run])
    for warning in overview.warnings:
        terminal.warn(warning)
    for entry in entries:
        if entry.damage:
            terminal.warn(f"{entry.folder.id} is {overview.state_of(entry).state}: {entry.damage}")
    sweeps = [entry.plan.sweep.values if entry.plan and entry.plan.sweep else {} for entry in entries]
    keys = list(dict.fromkeys(key for values in sweeps for key in values if key != "cluster")) if is_sweep else []
    is_roomy = terminal.is_roomy and not is_sweep
    rows: list[list[Cell]] = []
    objects = []
    for entry, values in zip(entries, sweeps, strict=True):
        metrics = entry.folder.layout.metrics
        problem = "" if entry.is_private else scan_records(metrics, tail_bytes=_TAIL_BYTES)
        if problem:
            terminal.warn(f"{entry.folder.id}: {problem}")
        layout, seen = entry.folder.layout, overview.state_of(entry)
        step = read_script_step(layout) if not entry.is_private and layout.is_script else read_last_step(metrics)
        shown = _as_json(entry, seen, step, problem)
        objects.append(shown | {"values": values})
        name = entry.folder.id if is_roomy else entry.folder.suffix
        rows.append([
            entry.folder.name,
            name,
            *(values.get(key, "-") for key in keys),
            Styled(seen.state, STATE_STYLES[seen.state]),
            f"{'?' if shown['step'] is None else shown['step']}/{shown['num_steps'] or '?'}",
            f"{step.loss:.4f}" if step and step.loss is not None else "?" if problem else "-",
            entry.plan.cluster.name if entry.plan else "?",
            entry.run.job_id if entry.run else "-",
            age(time.time() - entry.folder.created.timestamp()),
        ])  # fmt: skip
    if as_json:
        terminal.json(objects)
        return
    terminal.table((*_TITLES[:2], *(f"{key.rpartition('.')[2].upper()}…" for key in keys), *_TITLES[2:]), rows)


def _as_json(
    entry: RunEntry, seen: Job, step: StepRecord | ScriptStepRecord | None, metrics_problem: str
) -> dict[str, object]:
    folder, plan = entry.folder, entry.plan
    return {
        "name": folder.name,
        "id": folder.id,
        "state": seen.state,
        "is_final": seen.is_final,
        "reason": seen.reason,
        "step": step.step if step else None if metrics_problem else 0,
        "num_steps": step.num_steps if step else plan and plan.num_steps,
        "loss": step.loss if step else None,
        "metrics_problem": metrics_problem or None,
        "cluster": plan.cluster.name if plan else None,
        "scheduler": plan.cluster.scheduler if plan else None,
        "job_id": entry.run.job_id if entry.run else None,
        "sweep": plan.sweep.id if plan and plan.sweep else None,
        "created": folder.created.isoformat(),
        "age_seconds": round(time.time() - folder.created.timestamp()),
        "folder": str(folder.layout.root),
    }
