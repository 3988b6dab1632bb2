"""`ftkit resume` and `ftkit rerun`: continue a run, as planned or elsewhere; or repeat it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from ftkit.cli import arguments
from ftkit.cli.commands import current_context
from ftkit.cli.forwarded import forwarded_command
from ftkit.cli.image_check import require_same_image
from ftkit.cli.submit import make_ready, report_submission
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.cli.terminal.plan_view import plan_facts, say_overridden, show_findings
from ftkit.config.image_reference import parse_image
from ftkit.errors import ConfigError, NotRepeatedError, Problem, plural
from ftkit.launch import rerun
from ftkit.launch.code import copies_of_run
from ftkit.launch.inputs import count_documents
from ftkit.launch.preflight import check_trackers, run_checks
from ftkit.launch.render import render_job
from ftkit.launch.resolve import RunArgs
from ftkit.launch.resume import ResumedPlan, renew_code, replan
from ftkit.launch.submission import read_resumable_plan, resume, submit
from ftkit.paths import is_address
from ftkit.planning.layout import RunLayout
from ftkit.planning.plan import RunPlan, ScriptPlan
from ftkit.runs.failure import original_command
from ftkit.runs.manifest import build_manifest, doubts_about_weights
from ftkit.runs.metrics_file import RecordTail
from ftkit.runs.repeat import Original, judge, original_to_json, read_original
from ftkit.runs.signing import verify_beside
from ftkit.runs.sync import fetch_run

if TYPE_CHECKING:
    from ftkit.cli.arguments import PlacementOptions


@forwarded_command(
    "resume",
    "ftkit resume last",
    "ftkit resume demo --no-follow",
    "ftkit resume demo --processes-per-node 1 training.log_every_steps=5",
)
@arguments.run_argument
@click.argument("overrides", metavar="[KEY.PATH=VALUE]...", nargs=-1)
@arguments.placement_options
@arguments.time_option("the recipe's")
@click.option("--from", "copies", metavar="DEST", help="Bring RUN here from its copy in DEST/RUN first (RUN is an id).")
@click.option(
    "--allow", "allowed", metavar="KEY", multiple=True, help="Allow this key to change, although it affects the result."
)
@arguments.hf_token_option
@arguments.follow_option
@click.pass_obj
def resume_command(  # noqa: PLR0913 - one for each option
    typed: list[str], /, reference: str, overrides: tuple[str, ...], *, time_limit: str | None, copies: str | None,
    allowed: tuple[str, ...], hf_token_file: Path | None, follow: bool, **placement: Unpack[PlacementOptions],
) -> None:  # fmt: skip
    """Submit a run again; it continues from its newest checkpoint.

    {RUN} The address of a run's copy (s3://bucket/runs/RUN, made by 'ftkit runs sync') brings the run here first.

    With options, the run is planned again: on other nodes, or on another cluster that shares the workspace. Model,
    data, global batch and training.data_seed stay, so the order of the data does not change. KEY.PATH=VALUE changes a
    value of the recipe: more steps, logging, checkpoints and evaluation are allowed; a change that affects the result
    needs '--allow KEY'. '--allow code' replaces the run's copies of your script and packages by the files as they are
    now.
    """
    terminal, environment, project = Terminal(), arguments.job_environment(hf_token_file), current_context().project
    if wrong := [word for word in overrides if "=" not in word]:
        raise arguments.usage_error(f"expected KEY.PATH=VALUE after the run, got '{wrong[0]}'")
    if time_limit:
        overrides = (*overrides, f"resources.time_limit='{time_limit}'")
    args = RunArgs(overrides=overrides, **placement)
    if copies is not None:
        reference = f"{copies.rstrip('/')}/{reference}"
    if copies is not None or is_address(reference):
        fetched = fetch_run(reference, arguments.current_workspace(), terminal.say)
        terminal.say(f"{fetched.id} is in {fetched.layout.root}")
        reference = reference.rstrip("/").rpartition("/")[2]
    layout = arguments.get_run(reference).layout
    tail = RecordTail(layout.metrics, skips_old=True)  # show only this job's records
    changed: ResumedPlan[ScriptPlan] | ResumedPlan[RunPlan] | None
    plan = read_resumable_plan(layout)
    if isinstance(plan, ScriptPlan):
        changed = _change_script(plan, args, allowed)
    else:
        changed = _change(plan, args, allowed, terminal)
    if changed:
        say_overridden(terminal, project)
    if changed and isinstance(changed.plan, RunPlan):
        show_findings(run_checks(changed.plan, environment), terminal)
    elif isinstance(plan, RunPlan):
        for warning in check_trackers(plan, environment):
            terminal.warn(warning)
    image_facts = require_same_image(changed.plan if changed else plan, terminal)
    run = resume(plan, environment, ["ftkit", *typed], changed, image_facts, project)
    report_submission(run, terminal, is_followed=follow, tail=tail)


def _change_script(plan: ScriptPlan, args: RunArgs, allowed: Sequence[str]) -> ResumedPlan[ScriptPlan] | None:
    if args != RunArgs() or not set(allowed) <= {"code"}:
        fix = f"Start it as a new run: {original_command(plan.layout)}"
        raise ConfigError([Problem("command line", "", "of a script, only the code can change.", fix)])
    return renew_code(ResumedPlan(plan)) if allowed else None


def _change(plan: RunPlan, args: RunArgs, allowed: Sequence[str], terminal: Terminal) -> ResumedPlan[RunPlan] | None:
    """Plan the run again if the options ask for that, and list the differences; None if nothing changes."""
    if args == RunArgs() and not allowed:  # without a script, the run was copied here from another machine
        return None if plan.layout.script.is_file() else ResumedPlan(plan)
    settings, ctx = arguments.current_settings().settings, current_context()
    image = parse_image(settings.image, ctx.project) if settings.image else None
    changed = replan(plan, args, ctx, image, allowed)
    for warning in changed.warnings:
        terminal.warn(warning)
    new, processes = changed.plan.batch, plural(changed.plan.placement.world_size, "process")
    facts = [(change.key, f"{change.before} → {change.after}") for change in changed.changes]
    batch = f"{new.micro_batch_size} × {processes} × {new.accumulation_steps}"
    terminal.facts([*facts, ("global batch", f"{plural(new.global_batch_size, 'pack')} ({batch})")], is_data=False)
    return renew_code(changed) if "code" in allowed else changed


@forwarded_command("rerun", "ftkit rerun demo", "ftkit rerun demo --dry-run")
@arguments.run_argument
@arguments.placement_options
@arguments.name_option("the recipe's name with -rerun")
@click.option(
    "--allow", "allowed", metavar="PART", multiple=True, help="Accept different data, a different image, or code."
)
@arguments.require_signature_option("a bundle")
@arguments.import_option
@arguments.dry_run_option("the differences and the job script")
@arguments.hf_token_option
@arguments.follow_option
@click.pass_obj
def rerun_command(  # noqa: PLR0913 - one for each option
    typed: list[str], /, reference: str, *, name: str | None, allowed: tuple[str, ...], public_key: Path | None,
    import_missing: bool, dry_run: bool, hf_token_file: Path | None, follow: bool,
    **placement: Unpack[PlacementOptions],
) -> None:  # fmt: skip
    """Repeat a run with the same recipe, data, image and global batch, and compare the losses.

    All losses should be equal, bit for bit, on CPUs, and on the same GPUs with training.deterministic. Otherwise, a
    difference of up to 1% passes. Each difference is listed; different data or a different image is refused.

    RUN selects a run as in other commands, or is the path of a manifest.json, of a bundle from 'ftkit runs bundle', or
    the address of a copy from 'ftkit runs sync' (s3://bucket/runs/RUN). For these, the profile with the cluster's name
    here is used, not the one in the manifest.
    """
    terminal, ctx, workspace = Terminal(), current_context(), arguments.current_workspace()
    path = Path(reference)
    # A folder here that only has the name of a run is not a copy of one.
    is_copy = path.exists() and ("/" in reference or path.is_file() or RunLayout(path).manifest.is_file())
    is_own = not (is_copy or is_address(reference) or path.suffix in (".json", ".tar"))
    if public_key:
        verify_beside(path, public_key, "ftkit-bundle")
    original = read_original(str(arguments.get_run(reference).layout.root) if is_own else reference)
    image = arguments.current_settings().settings.image
    plan = rerun.plan_rerun(original, RunArgs(name=name, **placement), ctx, workspace, image, is_own=is_own)
    root = arguments.get_run(reference).layout.root if is_own else path if path.is_dir() else path.parent
    copies = copies_of_run(original.manifest, RunLayout(root).code, allows_changes="code" in allowed)
    (plan,) = count_documents([replace(plan, code=tuple(copy.plan for copy in copies))], ctx.environment)
    terminal.facts([("repeats", original.run.id), *plan_facts(plan)], is_data=False)
    say_overridden(terminal, ctx.project)
    if dry_run:
        _list_changes(original, plan, build_manifest(plan, ["ftkit", *typed], ctx.project), allowed, terminal)
        terminal.data(render_job(plan, ctx.project))
        return
    environment = arguments.job_environment(hf_token_file)
    ready = make_ready(
        plan, arguments.SubmitRequest(["ftkit", *typed], environment, copies, import_missing=import_missing), terminal
    )
    _list_changes(original, ready.plan, ready.manifest, allowed, terminal)
    ready = replace(
        ready,
        manifest={**ready.manifest, "repeats": rerun.repetition_record(original, allowed)},
        files={**ready.files, ready.plan.layout.original.name: original_to_json(original)},
    )
    run = submit(ready)
    report_submission(run, terminal, is_followed=follow)
    if follow and (verdict := judge(run.layout)):
        terminal.text(Styled(str(verdict), "green" if verdict.is_repeated else "yellow"))
        if verdict.beyond_step is not None:
            fix = f"compare them: ftkit compare {verdict.original} {run.id}"
            raise NotRepeatedError(f"{run.id} did not reproduce {verdict.original}", fix=fix)


def _list_changes(
    original: Original, plan: RunPlan, manifest: Mapping[str, object], allowed: Sequence[str], terminal: Terminal
) -> None:
    differences = rerun.changed_inputs(original, plan, manifest)
    rerun.check_inputs(differences, allowed)
    for each in differences:
        before, after = each.values
        terminal.warn(f"{each.section}: {each.key} is {after}, was {before}")
    for text in rerun.changes_between_starts(original):
        terminal.warn(text)
    for doubt in doubts_about_weights(original.manifest):
        terminal.warn(f"{doubt}: ftkit does not notice if the model was changed since {original.run.id}")
