"""`ftkit resume`: continue a run, as planned or on another cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import (
    RUN_HELP,
    current_settings,
    current_workspace,
    follow_option,
    get_run,
    hf_token_option,
    job_environment,
    placement_options,
    run_argument,
)
from ftkit.cli.commands import ForwardedCommand, current_context
from ftkit.cli.terminal.console import Terminal
from ftkit.errors import ConfigError, Problem, plural
from ftkit.paths import is_address

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.launch.resume import ResumeArgs, ResumedPlan
    from ftkit.planning.plan import RunPlan
    from ftkit.planning.script import ScriptPlan
    from ftkit.runs.job import SubmittedRun


@click.command(
    "resume",
    cls=ForwardedCommand,
    short_help="Continue a run from its newest checkpoint.",
    examples=(
        "ftkit resume last",
        "ftkit resume demo --no-follow",
        "ftkit resume demo --gpus-per-node 1 training.log_every_steps=5",
    ),
    help=f"""Submit a run again; it continues from its newest checkpoint.

    {RUN_HELP} The address of a run's copy (s3://bucket/runs/RUN, made by 'ftkit runs sync') brings the run here first.

    With options, the run is planned again: on other nodes, or on another cluster that shares the workspace. Model,
    data, global batch and training.data_seed stay, so the order of the data does not change. KEY.PATH=VALUE changes a
    value of the recipe: more steps, logging, checkpoints and evaluation are allowed; a change that affects the result
    needs '--allow KEY'. '--allow code' replaces the run's copies of your script and packages by the files as they are
    now.
    """,
)
@run_argument
@click.argument("overrides", metavar="[KEY.PATH=VALUE]...", nargs=-1)
@placement_options
@click.option("--time", "time_limit", metavar="LIMIT", help="Time limit in Slurm's format: 2-00:00:00.")
@click.option("--from", "copies", metavar="DEST", help="Bring RUN here from its copy in DEST/RUN first (RUN is an id).")
@click.option(
    "--allow", "allowed", metavar="KEY", multiple=True, help="Allow this key to change, although it affects the result."
)
@hf_token_option
@follow_option
@click.pass_obj
def command(  # noqa: PLR0913 - one for each option
    typed: list[str],
    /,
    reference: str,
    overrides: tuple[str, ...],
    *,
    num_nodes: int | None,
    gpus_per_node: int | None,
    cluster: str | None,
    time_limit: str | None,
    copies: str | None,
    allowed: tuple[str, ...],
    hf_token_file: Path | None,
    follow: bool,
) -> None:
    """Submit a run again."""
    from ftkit.cli.image_check import require_same_image
    from ftkit.cli.run import report_submission
    from ftkit.cli.run_script import say_overridden
    from ftkit.cli.terminal.plan_view import show_findings
    from ftkit.launch.jobs import read_resumable_plan, resume
    from ftkit.launch.preflight import check_trackers, run_checks
    from ftkit.launch.resume import ResumeArgs, ResumedPlan, renew_code
    from ftkit.planning.script import ScriptPlan
    from ftkit.runs.metrics_file import RecordTail

    terminal, environment = Terminal(), job_environment(hf_token_file)
    if wrong := [word for word in overrides if "=" not in word]:
        raise click.UsageError(f"expected KEY.PATH=VALUE after the run, got '{wrong[0]}'", click.get_current_context())
    if time_limit:
        overrides = (*overrides, f"resources.time_limit='{time_limit}'")
    args = ResumeArgs(num_nodes, gpus_per_node, cluster, overrides, allowed)
    if copies is not None:
        reference = f"{copies.rstrip('/')}/{reference}"
    if copies is not None or is_address(reference):
        _fetch(reference, terminal)
        reference = reference.rstrip("/").rpartition("/")[2]
    layout = get_run(reference).layout
    tail = RecordTail(layout.metrics, skips_old=True)  # show only this job's records
    plan, changed = read_resumable_plan(layout), None
    if isinstance(plan, ScriptPlan):
        run = _resume_script(plan, args, ["ftkit", *typed], environment, terminal)
        report_submission(run, terminal, does_follow=follow, tail=tail)
        return
    if args.asks_for_changes:
        changed = _replan(plan, args, terminal)
        changed = renew_code(changed) if "code" in args.allowed else changed
    elif not layout.script.is_file():  # the run was copied here, without the other machine's job script
        changed = ResumedPlan(plan)
    project = current_context().project
    if changed:
        say_overridden(terminal, project)
        show_findings(run_checks(changed.plan, environment), terminal)
    else:
        for warning in check_trackers(plan, environment):
            terminal.warn(warning)
    image_facts = require_same_image(changed.plan if changed else plan, terminal)
    run = resume(plan, environment, ["ftkit", *typed], changed, image_facts, project)
    report_submission(run, terminal, does_follow=follow, tail=tail)


def _resume_script(
    plan: ScriptPlan, args: ResumeArgs, typed: list[str], environment: dict[str, str], terminal: Terminal
) -> SubmittedRun:
    """Submit a script's run again with the same plan.

    Raises:
        ConfigError: a different plan is requested.
    """
    from ftkit.cli.image_check import require_same_image
    from ftkit.cli.run_script import say_overridden
    from ftkit.launch.jobs import resume
    from ftkit.launch.resume import ResumedPlan, renew_code
    from ftkit.runs.failure import original_command

    if replace(args, allowed=()).asks_for_changes or not set(args.allowed) <= {"code"}:
        fix = f"Start it as a new run: {original_command(plan.layout)}"
        raise ConfigError([Problem("command line", "", "of a script, only the code can change.", fix)])
    changed, project = None, current_context().project
    if args.allowed:
        changed = renew_code(ResumedPlan(plan))
        say_overridden(terminal, project)
    return resume(plan, environment, typed, changed, require_same_image(plan, terminal), project)


def _fetch(address: str, terminal: Terminal) -> None:
    """Bring the copy of a run into this workspace."""
    from ftkit.runs.storage.sync import fetch_run

    plan = fetch_run(address, current_workspace(), terminal.say)
    terminal.say(f"{plan.id} is in {plan.layout.root}")


def _replan(plan: RunPlan, args: ResumeArgs, terminal: Terminal) -> ResumedPlan[RunPlan]:
    """Plan the run again, and list the differences."""
    from ftkit.config.image_reference import parse_image
    from ftkit.launch.resume import replan

    settings, ctx = current_settings(), current_context()
    image = parse_image(settings.image, ctx.project) if settings.image else None
    changed = replan(plan, args, ctx, image)
    for warning in changed.warnings:
        terminal.warn(warning)
    new = changed.plan.batch
    facts = [(change.key, f"{change.before} → {change.after}") for change in changed.changes]
    batch = (
        f"{new.micro_batch_size} × {plural(changed.plan.placement.world_size, 'process')} × {new.accumulation_steps}"
    )
    terminal.facts([*facts, ("global batch", f"{plural(new.global_batch_size, 'pack')} ({batch})")], is_data=False)
    return changed
