"""`ftkit run`: plan a run, submit it, follow it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from ftkit.cli.arguments import follow_option, hf_token_option, job_environment, run_args, run_options
from ftkit.cli.commands import ForwardedCommand, current_context
from ftkit.cli.run_script import code_options, say_overridden, script_options
from ftkit.cli.terminal.console import Styled, Terminal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence  # noqa: TC004 - no pydantic reads these dataclasses
    from pathlib import Path

    from ftkit.launch.code import CodeCopy  # noqa: TC004
    from ftkit.launch.jobs import NewJob
    from ftkit.launch.resolve import RunArgs
    from ftkit.planning.plan import RunPlan
    from ftkit.planning.script import StopSignal
    from ftkit.runs.job import SubmittedRun
    from ftkit.runs.metrics_file import RecordTail


@click.command(
    "run",
    cls=ForwardedCommand,
    short_help="Plan a run, submit it, and follow it.",
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
@script_options
@code_options
@hf_token_option
@follow_option
@click.pass_obj
def command(  # noqa: PLR0913 - one for each option
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
    from ftkit.cli.run_script import copy_selected_code, run_script, split_script_args

    terminal = Terminal()
    copies = copy_selected_code(with_code, is_dev=is_dev, sent=sent_code)
    request = SubmitRequest(["ftkit", *typed], job_environment(hf_token_file), copies, where, does_import=does_import)
    if script is not None:
        from ftkit.launch.script import ScriptArgs

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
    from ftkit.cli.sweep import check_can_follow, show_plans, submit_sweep
    from ftkit.cli.terminal.plan_view import plan_facts
    from ftkit.launch.inputs import count_documents
    from ftkit.launch.render import render_job
    from ftkit.launch.resolve import resolve
    from ftkit.launch.sweep import expand, plan_sweep

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
        from ftkit.launch.jobs import submit

        report_submission(submit(ready[0]), terminal, does_follow=does_follow)


@dataclass(frozen=True)
class SubmitRequest:
    """How to submit a run.

    Attributes:
        command: the typed command line, for the manifest.
        environment: environment variables of its jobs.
        copies: copies of the user's code.
        where: where data is prepared: job, here, or with-training.
        does_import: whether to import a missing image.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    copies: Sequence[CodeCopy]
    where: str = "job"
    does_import: bool = field(default=False, kw_only=True)


def make_ready(plan: RunPlan, request: SubmitRequest, terminal: Terminal) -> NewJob[RunPlan]:
    """Check recipe, model and image of a plan; prepare the data if that happens on this machine.

    Raises:
        FtkitError: the run would fail.
    """
    from ftkit.cli.image_check import check_image
    from ftkit.cli.terminal.plan_view import show_findings
    from ftkit.launch.code import files_of
    from ftkit.launch.inputs import needs_preparation, prepare_here
    from ftkit.launch.jobs import NewJob
    from ftkit.launch.model import pin_revision
    from ftkit.launch.preflight import run_checks
    from ftkit.launch.render import render_job, render_preparation
    from ftkit.launch.resolve import resolve_image_link
    from ftkit.launch.templates import OVERRIDDEN_PARTS, find_overrides
    from ftkit.runs.manifest import build_manifest, uncommitted_changes

    environment, where = request.environment, request.where
    show_findings(run_checks(plan, environment), terminal)
    plan = pin_revision(plan, environment)
    image_facts = check_image(plan, terminal, does_import=request.does_import)
    plan = resolve_image_link(plan)  # again, for an image that was just imported
    project = current_context().project
    parts = {OVERRIDDEN_PARTS: find_overrides(project)}
    manifest = build_manifest(plan, request.command, project) | image_facts | parts
    preparation = None
    if where == "here":
        prepare_here(plan, environment, terminal.say)
    elif where == "job" and needs_preparation(plan, environment):
        preparation = render_preparation(plan, project)
    changes = uncommitted_changes()
    files = files_of(request.copies)
    if changes:
        files[plan.layout.code_changes.name] = changes
    script = render_job(plan, project, prepares=where == "with-training")
    return NewJob(plan, script, manifest, environment, preparation, files)


def report_submission(
    run: SubmittedRun, terminal: Terminal, *, does_follow: bool, tail: RecordTail | None = None
) -> None:
    """Report the submitted job; then follow it, or print the run's id for a script to use."""
    job = "process" if run.submission.scheduler == "local" else "job"
    terminal.say(Styled(f"\nsubmitted {run.id} as {job} {run.job_id}", "bold"))
    if run.submission.preparation_job_id:
        terminal.say(f"It starts after job {run.submission.preparation_job_id}, which prepares its data and weights.")
    if run.submission.messages:
        terminal.say(run.submission.messages)
    if does_follow:
        from ftkit.cli.follow import follow

        follow(run, terminal, tail)
    else:
        terminal.data(f"{run.id}\n")
