"""`ftkit run` and `ftkit plan`: plan a run or the runs of a sweep; check, submit and follow them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, Unpack

import click

from ftkit.cli import arguments
from ftkit.cli.commands import command, current_context
from ftkit.cli.forwarded import forwarded_command
from ftkit.errors import ConfigError, Problem, RunFailedError, plural

if TYPE_CHECKING:
    from ftkit.cli.arguments import RunOptions
    from ftkit.cli.terminal.console import Cell, Facts, Terminal
    from ftkit.launch.code import CodeCopy
    from ftkit.launch.resolve import RunArgs
    from ftkit.planning.plan import RunPlan, ScriptPlan, StopSignal
    from ftkit.runs.job import SubmittedRun

PlanT = TypeVar("PlanT", "RunPlan", "ScriptPlan")

_script_options = arguments.together(
    arguments.file_option("--script", about="Run this script instead of ftkit's trainer; its arguments follow '--'."),
    arguments.file_option(
        "--accelerate-config", about="accelerate's configuration for the script; with a RECIPE, made from its plan."
    ),
    click.option(
        "--stop-signal", type=click.Choice(["TERM", "USR1", "none"]), default="TERM", show_default=True,
        help="Signal for the script's processes when the time limit is near or the run is canceled.",
    ),
    click.option(
        "--requeue", "can_restart", is_flag=True,
        help="Restart the script after a time limit, a preemption, a lost node or a crash. It must continue from its "
        "own checkpoint.",
    ),
    click.option(
        "--prove", "is_proved", is_flag=True,
        help="Watch the script's first two optimizer steps, and report what trains wrongly without an error.",
    ),
)  # fmt: skip
_code_options = arguments.together(
    click.option(
        "--dev", "is_dev", is_flag=True,
        help="Run a copy of this ftkit, with its uncommitted changes, instead of the image's.",
    ),
    arguments.folder_option(
        "--with-code", multiple=True,
        about="Copy a package, or a folder of modules, into the run, and put it first on PYTHONPATH. Can be repeated.",
    ),
    # The copies of the two options above, sent from the machine where the command was typed:
    click.option("--sent-code", hidden=True, type=click.Path(exists=True, file_okay=False, path_type=Path)),
)  # fmt: skip


@forwarded_command(
    "run",
    "ftkit run demo",
    "ftkit run --image olmo3:25.02 --nodes 2",
    "ftkit run demo training.learning_rate=1e-3 training.max_steps=100",
    "ftkit run demo training.learning_rate=1e-3,2e-3",
    "ftkit run my-recipe.yaml --cluster mycluster --name first-try --no-follow",
    "ftkit run --image olmo3:25.02 --cluster mycluster --dry-run > job.sbatch",
    "ftkit run --script train.py -- --epochs 3 --output_dir {run}/model",
    "ftkit run --script train.py --prove",
    "ftkit run --script train.py --image olmo3:25.02 --cluster mycluster --dry-run",
    "ftkit run demo --with-code ./mylib --dev",
)
@arguments.run_options
@arguments.dry_run_option("the job script")
@arguments.import_option
@click.option(
    "--prepare", "where", type=click.Choice(["job", "here", "with-training"]), default="job", show_default=True,
    help="Where to prepare data and weights on Slurm: in a separate job without GPUs, on this machine before the run "
    "is submitted, or by the training job.",
)  # fmt: skip
@arguments.number_option(
    "--max-parallel", about="Largest number of a sweep's runs that train at the same time on Slurm."
)
@_script_options
@_code_options
@arguments.hf_token_option
@arguments.follow_option
@click.pass_obj
def run_command(  # noqa: PLR0913 - one for each option
    typed: list[str], /, words: tuple[str, ...], *, dry_run: bool, import_missing: bool, where: str,
    max_parallel: int | None,
    hf_token_file: Path | None, follow: bool, is_dev: bool, with_code: tuple[Path, ...], sent_code: Path | None,
    script: Path | None, accelerate_config: Path | None, stop_signal: StopSignal, can_restart: bool,
    is_proved: bool,
    **options: Unpack[RunOptions],
) -> None:  # fmt: skip
    """Plan a run, submit it, and follow it.

    RECIPE is a name that 'ftkit config recipes' lists, or the path of a file; without it, the image's default
    recipe. KEY.PATH=VALUE changes a value of the recipe. The run continues if you stop following it.

    KEY.PATH=VALUE,VALUE and --cluster NAME,NAME make a sweep: one run per combination. If one of them is
    refused, none is submitted. On Slurm they are a job array; on a single machine they train one after another.

    --script starts your own PyTorch or Hugging Face script instead of ftkit's trainer; what follows '--' are its
    arguments, in which {run} is the run's folder.
    """
    from ftkit.cli.terminal.console import Terminal
    from ftkit.cli.terminal.plan_view import plan_facts, script_facts

    terminal = Terminal()
    copies: list[CodeCopy] = []
    if with_code or is_dev or sent_code:
        from ftkit.launch.code import copy_selected

        copies = copy_selected(with_code, is_dev=is_dev, sent=sent_code)
    request = arguments.SubmitRequest(
        ["ftkit", *typed], arguments.job_environment(hf_token_file), copies, where, import_missing=import_missing
    )
    if is_proved and not script:
        fix = "Omit it: ftkit's own trainer is always checked before step 1."
        raise ConfigError([Problem("", "--prove", "is for a script (--script FILE).", fix)])
    if script is None:
        args = arguments.run_args(words, **options, code=tuple(copy.plan for copy in copies))
        plans = _plan_all(args, request.environment)
        if len(plans) > 1:
            _run_sweep(plans, request, terminal, max_parallel, dry_run=dry_run, is_followed=follow)
            return
    if max_parallel:
        fix = "Give a key several values (training.learning_rate=1e-5,3e-5), or omit it."
        raise ConfigError([Problem("", "--max-parallel", "has no effect: this is one run.", fix)])
    if script is None:
        _run_one(plans[0], plan_facts(plans[0]), request, terminal, dry_run=dry_run, is_followed=follow)
        return
    from ftkit.launch.user_script import ScriptArgs, resolve_script

    words, script_args = arguments.split_script_args(words, typed)
    about = ScriptArgs(script, script_args, accelerate_config, stop_signal, can_restart, is_proved)
    plan, copies = resolve_script(about, arguments.run_args(words, **options), copies, current_context())
    request = request._replace(copies=copies)
    _run_one(plan, script_facts(plan), request, terminal, dry_run=dry_run, is_followed=follow)


def _run_one(
    plan: PlanT, facts: Facts, request: arguments.SubmitRequest, terminal: Terminal, *, dry_run: bool,
    is_followed: bool,
) -> None:  # fmt: skip
    from ftkit.cli.terminal.plan_view import say_overridden
    from ftkit.launch.render import render_job

    project = current_context().project
    job_script = render_job(plan, project, prepares=request.where == "with-training")
    terminal.facts(facts, is_data=False)
    say_overridden(terminal, project)
    if dry_run:
        terminal.data(job_script)
        return
    from ftkit.cli.submit import make_ready, report_submission
    from ftkit.launch.submission import submit

    report_submission(submit(make_ready(plan, request, terminal)), terminal, is_followed=is_followed)


def _plan_all(args: RunArgs, environment: Mapping[str, str]) -> list[RunPlan]:
    from ftkit.launch.inputs import count_documents
    from ftkit.launch.resolve import resolve
    from ftkit.launch.sweep import expand, plan_sweep

    ctx = current_context()
    trials = expand(args, ctx)
    return count_documents(plan_sweep(trials, ctx) if len(trials) > 1 else [resolve(args, ctx)], environment)


@command(
    "plan",
    "ftkit plan demo",
    "ftkit plan --image olmo3:25.02 --cluster mycluster --nodes 2",
    "ftkit plan demo training.global_batch_size=64 --json",
    "ftkit plan olmo3-7b-full --gpu h100 --gpus-per-node 8",
)
@arguments.run_options
@click.option("--gpu", metavar="NAME", help="Preview on nodes with this GPU (l4, h100), without a cluster's profile.")
@arguments.json_option
def plan_command(words: tuple[str, ...], *, gpu: str | None, as_json: bool, **options: Unpack[RunOptions]) -> None:
    """Preview a run and check that it fits. Nothing is written or submitted.

    Takes the arguments of 'ftkit run', and fails for the same reasons: missing files, weights, data or packages, or,
    for measured families, less than half of the predicted memory. Otherwise, too little memory is only a warning, as
    an image that is not imported yet and a tracker's missing key are.
    """
    from ftkit.cli.image_check import missing_image
    from ftkit.cli.terminal.console import Terminal
    from ftkit.cli.terminal.plan_view import plan_facts, show_findings
    from ftkit.launch.preflight import run_checks
    from ftkit.planning.plan import plan_to_json

    if gpu and options["cluster"]:
        raise arguments.usage_error("--gpu takes the place of --cluster: omit one of them")
    terminal, plans = Terminal(), _plan_all(arguments.run_args(words, **options)._replace(gpu=gpu), os.environ)
    is_sweep = len(plans) > 1
    if as_json:
        texts = ",".join(map(plan_to_json, plans))
        terminal.data(f"[{texts}]\n" if is_sweep else texts)
    elif is_sweep:
        _show_plans(plans, terminal, is_data=True)
    else:
        terminal.facts(plan_facts(plans[0]), is_data=True)
    if not is_sweep and (missing := missing_image(plans[0])):
        terminal.warn(f"{missing.what}; {missing.fix}")
    for plan in plans:
        show_findings(run_checks(plan, os.environ, is_preview=True), terminal)


def _show_plans(plans: Sequence[RunPlan], terminal: Terminal, *, is_data: bool) -> None:
    from ftkit.cli.terminal.console import Styled
    from ftkit.cli.terminal.format import count, duration, gib
    from ftkit.launch.sweep import find_other_documents

    keys = list(dict.fromkeys(key for plan in plans if plan.sweep for key in plan.sweep.values))
    own = (f"{key.rpartition('.')[2].upper()}…" for key in keys)
    titles = ("RUN", *own, "#STEPS", "#DOCUMENTS THAT FIT…", "#PROCESSES", "#MEMORY", "#SPEED", "#TIME", "#COST")
    rows: list[list[Cell]] = []
    for plan in plans:
        values, documents, seconds = plan.sweep.values if plan.sweep else {}, plan.documents, plan.training_seconds
        cost = None if seconds is None else plan.cost_of(seconds)
        rows.append([
            plan.name,
            *(values.get(key, "-") for key in keys),
            "?" if plan.num_steps is None else str(plan.num_steps),
            f"{documents.num_fitting:,} of {documents.num_read:,}" if documents else "?",
            str(plan.placement.world_size),
            gib(plan.memory.total),
            f"{count(plan.speed.tokens_per_second)} tok/s" if plan.speed else "-",
            "-" if seconds is None else duration(seconds),
            "-" if cost is None else f"{cost:,.2f}",
        ])  # fmt: skip
    used = [index for index in range(len(titles)) if index <= len(keys) or any(row[index] != "-" for row in rows)]
    shown = [[row[index] for index in used] for row in rows]
    terminal.table([titles[index] for index in used], shown, is_data=is_data)
    if warning := find_other_documents(plans):
        terminal.warn(warning)
    for plan in plans:
        for note in plan.notes:
            terminal.say(Styled(f"{plan.name}: {note}", "yellow"))


def _follow(run: SubmittedRun, terminal: Terminal) -> RunFailedError | None:
    """Follow a run of a sweep; return its failure, after which the others run, as on Slurm. Raises it if canceled."""
    from ftkit.cli.follow import follow

    try:
        follow(run, terminal)
    except RunFailedError as error:
        if run.layout.canceled.exists():
            raise
        terminal.warn(str(error))
        return error
    return None


def _run_sweep(
    plans: Sequence[RunPlan], request: arguments.SubmitRequest, terminal: Terminal, max_parallel: int | None, *,
    dry_run: bool, is_followed: bool,
) -> None:  # fmt: skip
    """Submit the runs of a sweep, and follow those on this machine, one after another.

    On Slurm they are a job array, of which at most `max_parallel` train at a time; with other resources, more arrays,
    each of which then waits for the end of the one before.
    """
    from ftkit.cli.terminal.plan_view import say_overridden
    from ftkit.launch.render import render_job
    from ftkit.launch.submission import NewJob, submit_array
    from ftkit.launch.sweep import make_arrays

    project = current_context().project
    scripts = [render_job(plan, project, prepares=request.where == "with-training") for plan in plans]
    _show_plans(plans, terminal, is_data=False)
    if not is_followed and not dry_run and any(plan.cluster.scheduler == "local" for plan in plans):
        fix = "A sweep on one machine trains one run after another: omit --no-follow."
        raise ConfigError([Problem("", "--no-follow", "would leave no process to start the next run.", fix)])
    say_overridden(terminal, project)
    if dry_run:
        new = [NewJob(plan, script, {}, {}) for plan, script in zip(plans, scripts, strict=True)]
        arrays = [job for jobs, _ in make_arrays(new, max_parallel, project) for job in jobs]
        terminal.data("".join(text for job in arrays for text in (*map(str, job.files.values()), job.script)))
        return
    from ftkit.cli.submit import make_ready
    from ftkit.cli.terminal.comparison_view import show_curves
    from ftkit.cli.terminal.console import Styled
    from ftkit.runs.compare import read_run

    ready = [make_ready(plan, request, terminal) for plan in plans]
    submitted: list[SubmittedRun] = []
    failures: list[tuple[str, RunFailedError]] = []
    for jobs, tasks in make_arrays(ready, max_parallel, project):
        runs = submit_array(jobs, tasks, submitted, max_parallel)
        submitted += runs
        for run in runs:
            terminal.say(Styled(f"submitted {run.id} as {run.job_id}", "bold"))
            if run.submission.scheduler == "local" and (failure := _follow(run, terminal)):
                failures.append((run.id, failure))
    show_curves([read_run(run.layout) for run in submitted], terminal, is_data=False)
    name = ready[0].plan.sweep.id if ready[0].plan.sweep else ""
    terminal.say(
        f"\n{plural(len(ready), 'run')}. To see and compare them:\n  ftkit runs {name}\n  ftkit compare {name}"
    )
    terminal.data("".join(f"{run.id}\n" for run in submitted))
    if failures:
        name, first = failures[0]
        what = f"{len(failures)} of {plural(len(submitted), 'run')} did not complete"
        raise RunFailedError(what, exit_code=first.exit_code, fix=f"see why: ftkit status {name}")
