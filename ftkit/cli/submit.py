"""Check a planned run before it is submitted; report its submission, and follow it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

from ftkit.checkout import own_checkout, read_changes
from ftkit.cli.commands import current_context
from ftkit.cli.follow import follow
from ftkit.cli.image_check import check_image
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.cli.terminal.plan_view import say_overridden, show_findings
from ftkit.data.staging import needs_preparation, prepare_here
from ftkit.launch.code import files_of
from ftkit.launch.model import pin_revision
from ftkit.launch.preflight import run_checks
from ftkit.launch.render import render_job, render_preparation
from ftkit.launch.resolve import resolve_image_link
from ftkit.launch.side_jobs import submit
from ftkit.launch.submission import NewJob
from ftkit.launch.templates import OVERRIDDEN_PARTS, find_overrides
from ftkit.launch.user_script import accelerate_json
from ftkit.planning.plan import RunPlan, ScriptPlan
from ftkit.runs.manifest import build_manifest

if TYPE_CHECKING:
    from ftkit.cli.arguments import SubmitRequest
    from ftkit.launch.render import SideJob
    from ftkit.runs.job import SubmittedRun
    from ftkit.runs.metrics_file import RecordTail

PlanT = TypeVar("PlanT", RunPlan, ScriptPlan)


def make_ready(plan: PlanT, request: SubmitRequest, terminal: Terminal) -> NewJob[PlanT]:
    """Check a plan and its model and image; prepare the data if that happens on this machine."""
    environment, where, project = request.environment, request.where, current_context().project
    show_findings(run_checks(plan, environment), terminal)
    if not isinstance(plan, ScriptPlan):
        plan = pin_revision(plan, environment)
    image_facts = check_image(plan, terminal, import_missing=request.import_missing)
    plan = resolve_image_link(plan)  # again, for an image that was just imported
    manifest = build_manifest(plan, request.command, project) | image_facts
    texts, preparation = {plan.layout.code_changes.name: read_changes(own_checkout())}, None
    if isinstance(plan, ScriptPlan):
        texts[plan.layout.accelerate_config.name] = accelerate_json(plan)
    elif where == "here":
        prepare_here(plan, environment, terminal.say)
    elif where == "job" and needs_preparation(plan, environment):
        preparation = render_preparation(plan, project)
    files = files_of(request.copies) | {name: text for name, text in texts.items() if text}
    script = render_job(plan, project, prepares=where == "with-training")
    return NewJob(plan, script, manifest | {OVERRIDDEN_PARTS: find_overrides(project)}, environment, preparation, files)


def submit_job(job: SideJob, terminal: Terminal, *, dry_run: bool) -> str:
    """Submit a job besides training, and return its id; only print its script for a dry run, and return no id."""
    say_overridden(terminal, current_context().project)
    if dry_run:
        terminal.data(job.script)
    return "" if dry_run else submit(job, os.environ)


def report_submission(
    run: SubmittedRun, terminal: Terminal, *, is_followed: bool, tail: RecordTail | None = None
) -> None:
    """Report the submitted job; then follow it, or print the run's id for a script to use."""
    job = "process" if run.submission.scheduler == "local" else "job"
    terminal.say(Styled(f"\nsubmitted {run.id} as {job} {run.job_id}", "bold"))
    if run.submission.preparation_job_id:
        terminal.say(f"It starts after job {run.submission.preparation_job_id}, which prepares its data and weights.")
    if run.submission.messages:
        terminal.say(run.submission.messages)
    if is_followed:
        follow(run, terminal, tail)
    else:
        terminal.data(f"{run.id}\n")
