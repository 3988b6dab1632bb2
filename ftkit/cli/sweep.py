"""Plan, submit and list the runs of a sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit.cli.terminal.console import Cell, Column, Styled, Terminal
from ftkit.cli.terminal.format import count, duration, gib
from ftkit.errors import ConfigError, FtkitError, Problem, SubmitError, plural
from ftkit.launch.sweep import find_other_documents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftkit.launch.jobs import NewJob
    from ftkit.planning.plan import RunPlan
    from ftkit.runs.job import SubmittedRun


def show_plans(plans: Sequence[RunPlan], terminal: Terminal, *, is_data: bool) -> None:
    """Print one row per run of a sweep with its values, then the notes of all runs."""
    keys = list(dict.fromkeys(key for plan in plans if plan.sweep for key in plan.sweep.values))
    columns = (
        Column("RUN"),
        *(Column(key.rpartition(".")[2].upper(), can_shrink=True) for key in keys),
        Column("STEPS", is_number=True),
        Column("DOCUMENTS THAT FIT", is_number=True, can_shrink=True),
        Column("PROCESSES", is_number=True),
        Column("MEMORY", is_number=True),
        Column("SPEED", is_number=True),
        Column("TIME", is_number=True),
        Column("COST", is_number=True),
    )
    rows: list[list[Cell]] = [
        [
            plan.name,
            *((plan.sweep.values if plan.sweep else {}).get(key, "-") for key in keys),
            "?" if plan.num_steps is None else str(plan.num_steps),
            f"{plan.documents.num_fitting:,} of {plan.documents.num_read:,}" if plan.documents else "?",
            str(plan.placement.world_size),
            gib(plan.memory.total),
            f"{count(plan.speed.tokens_per_second)} tok/s" if plan.speed else "-",
            "-" if plan.training_seconds is None else duration(plan.training_seconds),
            _cost(plan),
        ]
        for plan in plans
    ]
    used = [index for index in range(len(columns)) if index <= len(keys) or any(row[index] != "-" for row in rows)]
    shown = [[row[index] for index in used] for row in rows]
    terminal.table([columns[index] for index in used], shown, is_data=is_data)
    if warning := find_other_documents(plans):
        terminal.warn(warning)
    for plan in plans:
        for note in plan.notes:
            terminal.say(Styled(f"{plan.name}: {note}", "yellow"))


def _cost(plan: RunPlan) -> str:
    cost = None if plan.training_seconds is None else plan.cost_of(plan.training_seconds)
    return "-" if cost is None else f"{cost:,.2f}"


def check_can_follow(plans: Sequence[RunPlan], *, follow: bool) -> None:
    """Refuse to start several runs on this machine at the same time.

    Raises:
        ConfigError: they train on this machine, and no process would remain to start one after another.
    """
    if not follow and any(plan.cluster.scheduler == "local" for plan in plans):
        raise ConfigError(
            [Problem("", "--no-follow", "would leave no process to start the next run.",
                     "A sweep on one machine trains one run after another: omit --no-follow.")]
        )  # fmt: skip


def submit_sweep(ready: Sequence[NewJob[RunPlan]], terminal: Terminal) -> None:
    """Submit the runs of a sweep, and follow those on this machine, one after another.

    Raises:
        SubmitError: the scheduler refused one; those before it are submitted.
        RunFailedError: one on this machine failed; later ones were not started.
    """
    from ftkit.cli.follow import follow
    from ftkit.launch.jobs import submit

    submitted: list[SubmittedRun] = []
    for each in ready:
        try:
            run = submit(each)
        except FtkitError as error:
            raise _refused(each, submitted, error) from error
        submitted.append(run)
        terminal.say(Styled(f"submitted {run.id} as {run.job_id}", "bold"))
        if run.submission.scheduler == "local":
            follow(run, terminal)
    sweep = ready[0].plan.sweep
    name = sweep.id if sweep else ""
    terminal.say(
        f"\n{plural(len(ready), 'run')}. To see and compare them:\n  ftkit runs {name}\n  ftkit compare {name}"
    )
    terminal.data("".join(f"{run.id}\n" for run in submitted))


def _refused(ready: NewJob[RunPlan], submitted: Sequence[SubmittedRun], error: FtkitError) -> FtkitError:
    if not submitted:
        return error
    commands = "; ".join(f"ftkit cancel {run.id}" for run in submitted)
    return SubmitError(
        f"{ready.plan.name}: {error.what}",
        meaning=f"{error.meaning}; already submitted: {plural(len(submitted), 'run')} of the sweep".lstrip("; "),
        fix=f"{error.fix}; to cancel them: {commands}".lstrip("; "),
    )
