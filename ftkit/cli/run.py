"""`ftkit run`: plan, submit, watch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from ftkit.cli.arguments import follow_option, hf_token_option, run_args, run_options
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.follow import follow
from ftkit.cli.image_check import ensure_image
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.cli.terminal.plan_view import plan_facts, show_findings
from ftkit.config.context import Context
from ftkit.launch.jobs import submit
from ftkit.launch.preflight import check_image, run_checks
from ftkit.launch.render import render_job
from ftkit.launch.resolve import resolve, resolve_image_link
from ftkit.launch.slurm import sbatch_variables
from ftkit.runs.manifest import build_manifest

if TYPE_CHECKING:
    from ftkit.runs.records import RecordTail
    from ftkit.runs.submission import SubmittedRun


@click.command(
    "run",
    cls=ExamplesCommand,
    short_help="Plan a run, submit it, and watch it learn.",
    examples=(
        "ftkit run demo",
        "ftkit run --image olmo3:25.02 --nodes 2",
        "ftkit run demo training.learning_rate=1e-3 training.max_steps=100",
        "ftkit run my-recipe.yaml --cluster mycluster --name first-try --no-follow",
        "ftkit run --image olmo3:25.02 --cluster mycluster --dry-run > job.sbatch",
    ),
)
@run_options
@click.option("--dry-run", is_flag=True, help="Print the job script to stdout; write and submit nothing.")
@click.option("--import", "does_import", is_flag=True, help="Import the image first if it is not there.")
@hf_token_option
@follow_option
@click.pass_obj
def command(
    typed: list[str],
    /,
    words: tuple[str, ...],
    *,
    dry_run: bool,
    does_import: bool,
    follow: bool,
    **options: Any,
) -> None:
    """Plan a run, submit it, and watch it learn.

    RECIPE is a name that 'ftkit recipes' lists, or the path of a file; without it, the image's default
    recipe. KEY.PATH=VALUE changes a value of the recipe. A run goes on when you stop watching it.
    """
    terminal, ctx = Terminal(), Context.here()
    plan = resolve(run_args(words, **options), ctx)
    script = render_job(plan).script
    terminal.facts(plan_facts(plan), is_data=False)
    if dry_run:
        terminal.data(script)
        return
    show_findings(run_checks(plan, os.environ), terminal)
    image_facts = ensure_image(plan, terminal, does_import=does_import)
    check_image(plan)
    plan = resolve_image_link(plan)  # there only now, if it was imported
    script = render_job(plan).script
    if plan.cluster.scheduler == "slurm":
        for variable in sbatch_variables(os.environ):
            terminal.warn(f"{variable} in your environment wins over the job script")
    run = submit(plan, script, build_manifest(plan, ["ftkit", *typed], ctx.project) | image_facts)
    report_submission(run, terminal, does_follow=follow)


def report_submission(
    run: SubmittedRun, terminal: Terminal, *, does_follow: bool, tail: RecordTail | None = None
) -> None:
    """Say what the scheduler has taken; then watch it, or print the run's id for a script to use."""
    job = "process" if run.submission.scheduler == "local" else "job"
    terminal.say(Styled(f"\nsubmitted {run.id} as {job} {run.submission.job_id}", "bold"))
    if run.submission.messages:
        terminal.say(run.submission.messages)
    if does_follow:
        follow(run, terminal, tail)
    else:
        terminal.data(f"{run.id}\n")
