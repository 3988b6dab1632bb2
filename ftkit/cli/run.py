"""`ftkit run` and `ftkit plan`: plan a run or the runs of a sweep; check, submit and follow them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftkit.cli.arguments import follow_option, hf_token_option, job_environment, json_option, run_args, run_options
from ftkit.cli.commands import ExamplesCommand, current_context
from ftkit.cli.forwarded import ForwardedCommand
from ftkit.cli.submit import (
    SubmitRequest,
    copy_selected_code,
    make_ready,
    report_submission,
    run_script,
    say_overridden,
    split_script_args,
)
from ftkit.cli.terminal.console import Cell, Column, Styled, Terminal
from ftkit.cli.terminal.format import count, duration, gib
from ftkit.cli.terminal.plan_view import plan_facts, show_findings
from ftkit.errors import ConfigError, FtkitError, Problem, SubmitError, plural
from ftkit.launch.inputs import count_documents
from ftkit.launch.render import render_job
from ftkit.launch.resolve import resolve
from ftkit.launch.submission import submit
from ftkit.launch.sweep import expand, find_other_documents, plan_sweep
from ftkit.planning.plan import plan_to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftkit.launch.resolve import RunArgs
    from ftkit.launch.submission import NewJob
    from ftkit.planning.plan import RunPlan, StopSignal
    from ftkit.runs.job import SubmittedRun


_CODE_OPTIONS = (
    click.option(
        "--dev",
        "is_dev",
        is_flag=True,
        help="Run a copy of this ftkit, with its uncommitted changes, instead of the image's.",
    ),
    click.option(
        "--with-code",
        metavar="DIR",
        multiple=True,
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Copy a package, or a folder of modules, into the run, and put it first on PYTHONPATH. Can be repeated.",
    ),
    click.option(
        "--sent-code", metavar="DIR", hidden=True, type=click.Path(exists=True, file_okay=False, path_type=Path)
    ),  # the copies of the two options above, sent from the machine where the command was typed
)
_SCRIPT_OPTIONS = (
    click.option(
        "--script",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Run this script instead of ftkit's trainer; its arguments follow '--'.",
    ),
    click.option(
        "--accelerate-config",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="accelerate's configuration for the script; with a RECIPE, one is made from its plan.",
    ),
    click.option(
        "--stop-signal",
        type=click.Choice(["TERM", "USR1", "none"]),
        default="TERM",
        show_default=True,
        help="Signal for the script's processes when the time limit is near or the run is canceled.",
    ),
    click.option(
        "--requeue",
        "can_restart",
        is_flag=True,
        help="Restart the script after a time limit, a preemption, a lost node or a crash. It must continue from its "
        "own checkpoint.",
    ),
)


def _own_code_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options about the user's own code and script."""
    for option in reversed((*_SCRIPT_OPTIONS, *_CODE_OPTIONS)):
        function = option(function)
    return function


@click.command(
    "run",
    cls=ForwardedCommand,
    examples=(
        "ftkit run demo",
        "ftkit run --image olmo3:25.02 --nodes 2",
        "ftkit run demo training.learning_rate=1e-3 training.max_steps=100",
        "ftkit run demo training.learning_rate=1e-3,2e-3",
        "ftkit run my-recipe.yaml --cluster mycluster --name first-try --no-follow",
        "ftkit run --image olmo3:25.02 --cluster mycluster --dry-run > job.sbatch",
        "ftkit run --script train.py -- --epochs 3 --output_dir {run}/model",
        "ftkit run --script train.py --image olmo3:25.02 --cluster mycluster --dry-run",
        "ftkit run demo --with-code ./mylib --dev",
    ),
)
@run_options
@click.option("--dry-run", is_flag=True, help="Print the job script to stdout; write and submit nothing.")
@click.option("--import", "does_import", is_flag=True, help="Import the image first if it is missing.")
@click.option(
    "--prepare",
    "where",
    type=click.Choice(["job", "here", "with-training"]),
    default="job",
    show_default=True,
    help="Where to prepare data and weights on Slurm: in a separate job without GPUs, on this machine before the "
    "run is submitted, or by the training job.",
)
@_own_code_options
@hf_token_option
@follow_option
@click.pass_obj
def run_command(  # noqa: PLR0913 - one for each option
    typed: list[str],
    /,
    words: tuple[str, ...],
    *,
    dry_run: bool,
    does_import: bool,
    where: str,
    hf_token_file: Path | None,
    follow: bool,
    is_dev: bool,
    with_code: tuple[Path, ...],
    sent_code: Path | None,
    script: Path | None,
    accelerate_config: Path | None,
    stop_signal: StopSignal,
    can_restart: bool,
    **options: Any,
) -> None:
    """Plan a run, submit it, and follow it.

    RECIPE is a name that 'ftkit config recipes' lists, or the path of a file; without it, the image's default
    recipe. KEY.PATH=VALUE changes a value of the recipe. The run continues if you stop following it.

    KEY.PATH=VALUE,VALUE and --cluster NAME,NAME make a sweep: one run per combination. If one of them is
    refused, none is submitted. On a single machine the runs train one after another.

    --script starts your own PyTorch or Hugging Face script instead of ftkit's trainer; what follows '--' are its
    arguments, in which {run} is the run's folder.
    """
    terminal = Terminal()
    copies = copy_selected_code(with_code, is_dev=is_dev, sent=sent_code)
    request = SubmitRequest(["ftkit", *typed], job_environment(hf_token_file), copies, where, does_import=does_import)
    if script is not None:
        from ftkit.launch.user_script import ScriptArgs

        words, script_args = split_script_args(words, typed)
        about = ScriptArgs(script, script_args, accelerate_config, stop_signal, can_restart)
        run = run_script(about, run_args(words, **options), request, terminal, dry_run=dry_run)
        if run:
            report_submission(run, terminal, does_follow=follow)
        return
    args = run_args(words, **options, code=tuple(copy.plan for copy in copies))
    run_trainer(args, request, terminal, dry_run=dry_run, does_follow=follow)


def run_trainer(args: RunArgs, request: SubmitRequest, terminal: Terminal, *, dry_run: bool, does_follow: bool) -> None:
    """Plan a run of ftkit's trainer, or each run of a sweep, and submit it."""
    ctx = current_context()
    trials = expand(args, ctx)
    is_sweep = len(trials) > 1
    plans = count_documents(plan_sweep(trials, ctx) if is_sweep else [resolve(args, ctx)], request.environment)
    scripts = [render_job(plan, ctx.project, prepares=request.where == "with-training") for plan in plans]
    if is_sweep:
        show_plans(plans, terminal, is_data=False)
        check_can_follow(plans, follow=does_follow or dry_run)
    else:
        terminal.facts(plan_facts(plans[0]), is_data=False)
    say_overridden(terminal, ctx.project)
    if dry_run:
        terminal.data("".join(scripts))
        return
    ready = [make_ready(plan, request, terminal) for plan in plans]
    if is_sweep:
        submit_sweep(ready, terminal)
    else:
        report_submission(submit(ready[0]), terminal, does_follow=does_follow)


@click.command(
    "plan",
    cls=ExamplesCommand,
    examples=(
        "ftkit plan demo",
        "ftkit plan --image olmo3:25.02 --cluster mycluster --nodes 2",
        "ftkit plan demo training.global_batch_size=64 --json",
    ),
)
@run_options
@json_option
def plan_command(words: tuple[str, ...], *, as_json: bool, **options: Any) -> None:
    """Preview a run and check that it fits. Nothing is written or submitted.

    Takes the arguments of 'ftkit run', and fails for the same reasons: missing files, weights, data, packages or
    memory. An image that is not imported yet is only a warning.
    """
    from ftkit.cli.image_check import missing_image
    from ftkit.launch.preflight import run_checks

    terminal, ctx = Terminal(), current_context()
    args = run_args(words, **options)
    trials = expand(args, ctx)
    if len(trials) > 1:
        plans = count_documents(plan_sweep(trials, ctx), os.environ)
        if as_json:
            terminal.data(f"[{','.join(map(plan_to_json, plans))}]\n")
        else:
            show_plans(plans, terminal, is_data=True)
        for plan in plans:
            show_findings(run_checks(plan, os.environ), terminal)
        return
    (plan,) = count_documents([resolve(args, ctx)], os.environ)
    if as_json:
        terminal.data(plan_to_json(plan))
    else:
        terminal.facts(plan_facts(plan), is_data=True)
    if missing := missing_image(plan):
        terminal.warn(f"{missing.what}; {missing.fix}")
    show_findings(run_checks(plan, os.environ), terminal)


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
