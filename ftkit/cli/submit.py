"""Check a planned run, and submit it; or a run of the user's own script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from ftkit.cli.commands import current_context
from ftkit.cli.follow import follow
from ftkit.cli.image_check import check_image
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.cli.terminal.plan_view import show_findings
from ftkit.data.staging import needs_preparation, prepare_here
from ftkit.launch.code import CodeCopy, files_of
from ftkit.launch.model import pin_revision
from ftkit.launch.preflight import run_checks
from ftkit.launch.render import render_job, render_preparation
from ftkit.launch.resolve import resolve_image_link
from ftkit.launch.submission import NewJob, submit
from ftkit.launch.templates import OVERRIDDEN_PARTS, find_overrides
from ftkit.launch.user_script import accelerate_json
from ftkit.planning.plan import RunPlan, ScriptPlan
from ftkit.runs.manifest import build_manifest, uncommitted_changes

if TYPE_CHECKING:
    from ftkit.cli.arguments import SubmitRequest
    from ftkit.runs.job import SubmittedRun
    from ftkit.runs.metrics_file import RecordTail

PlanT = TypeVar("PlanT", RunPlan, ScriptPlan)


def make_ready(plan: RunPlan, request: SubmitRequest, terminal: Terminal) -> NewJob[RunPlan]:
    """Check recipe, model and image of a plan; prepare the data if that happens on this machine."""
    environment, where, project = request.environment, request.where, current_context().project
    show_findings(run_checks(plan, environment), terminal)
    plan = pin_revision(plan, environment)
    plan, manifest = _check_image(plan, request, terminal)
    preparation = None
    if where == "here":
        prepare_here(plan, environment, terminal.say)
    elif where == "job" and needs_preparation(plan, environment):
        preparation = render_preparation(plan, project)
    files = files_of(request.copies)
    if changes := uncommitted_changes():
        files[plan.layout.code_changes.name] = changes
    script = render_job(plan, project, prepares=where == "with-training")
    return NewJob(plan, script, manifest, environment, preparation, files)


def _check_image(plan: PlanT, request: SubmitRequest, terminal: Terminal) -> tuple[PlanT, dict[str, object]]:
    """Check the image, or import it; return the plan with the image's file, and the run's manifest."""
    project = current_context().project
    image_facts = check_image(plan, terminal, does_import=request.does_import)
    plan = resolve_image_link(plan)  # again, for an image that was just imported
    manifest = build_manifest(plan, request.command, project) | image_facts
    return plan, manifest | {OVERRIDDEN_PARTS: find_overrides(project)}


def submit_script(
    plan: ScriptPlan, copies: Sequence[CodeCopy], request: SubmitRequest, terminal: Terminal
) -> SubmittedRun:
    """Check the image of a script's plan, and submit the script."""
    project = current_context().project
    show_findings(run_checks(plan, request.environment), terminal)
    plan, manifest = _check_image(plan, request, terminal)
    texts = {
        plan.layout.code_changes.name: uncommitted_changes(),
        plan.layout.accelerate_config.name: accelerate_json(plan),
    }
    files = {**files_of(copies), **{name: text for name, text in texts.items() if text}}
    return submit(NewJob(plan, render_job(plan, project), manifest, request.environment, files=files))


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
        follow(run, terminal, tail)
    else:
        terminal.data(f"{run.id}\n")
