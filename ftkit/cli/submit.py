"""Check a planned run, submit it, and report it; or a run of the user's own script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ftkit.cli.commands import current_context
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.cli.terminal.plan_view import script_facts, show_findings
from ftkit.launch.code import CodeCopy, copy_own_package, copy_packages, files_of, read_unpacked
from ftkit.launch.inputs import needs_preparation, prepare_here
from ftkit.launch.model import pin_revision
from ftkit.launch.render import render_job, render_preparation
from ftkit.launch.resolve import resolve_image_link
from ftkit.launch.templates import OVERRIDDEN_PARTS, find_overrides
from ftkit.planning.plan import RunPlan, ScriptPlan
from ftkit.runs.manifest import build_manifest, uncommitted_changes

if TYPE_CHECKING:
    from ftkit.launch.resolve import RunArgs
    from ftkit.launch.submission import NewJob
    from ftkit.launch.user_script import ScriptArgs
    from ftkit.runs.job import SubmittedRun
    from ftkit.runs.metrics_file import RecordTail

PlanT = TypeVar("PlanT", RunPlan, ScriptPlan)


@dataclass(frozen=True)
class SubmitRequest:
    """How to submit a run; `command` is the typed command line, for the manifest."""

    command: Sequence[str]
    environment: Mapping[str, str]
    copies: Sequence[CodeCopy]
    where: str = "job"  # data is prepared: in a job, here, or with-training
    does_import: bool = field(default=False, kw_only=True)


def make_ready(plan: RunPlan, request: SubmitRequest, terminal: Terminal) -> NewJob[RunPlan]:
    """Check recipe, model and image of a plan; prepare the data if that happens on this machine."""
    from ftkit.launch.preflight import run_checks
    from ftkit.launch.submission import NewJob

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
    from ftkit.cli.image_check import check_image

    project = current_context().project
    image_facts = check_image(plan, terminal, does_import=request.does_import)
    plan = resolve_image_link(plan)  # again, for an image that was just imported
    manifest = build_manifest(plan, request.command, project) | image_facts
    return plan, manifest | {OVERRIDDEN_PARTS: find_overrides(project)}


def run_script(
    script: ScriptArgs, run: RunArgs, request: SubmitRequest, terminal: Terminal, *, dry_run: bool
) -> SubmittedRun | None:
    """Plan a run of a script, check its image, and submit it; None if only its job script was printed.

    Accelerate's configuration is made from the plan of the recipe in `run`, if it has one.
    """
    from ftkit.launch.user_script import accelerate_json, resolve_script

    ctx = current_context()
    plan, copies = resolve_script(script, run, request.copies, ctx)
    terminal.facts(script_facts(plan), is_data=False)
    say_overridden(terminal, ctx.project)
    if dry_run:
        terminal.data(render_job(plan, ctx.project))
        return None
    from ftkit.launch.preflight import run_checks
    from ftkit.launch.submission import NewJob, submit

    show_findings(run_checks(plan, request.environment), terminal)
    plan, manifest = _check_image(plan, request, terminal)
    texts = {
        plan.layout.code_changes.name: uncommitted_changes(),
        plan.layout.accelerate_config.name: accelerate_json(plan),
    }
    files = {**files_of(copies), **{name: text for name, text in texts.items() if text}}
    return submit(NewJob(plan, render_job(plan, ctx.project), manifest, request.environment, files=files))


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


def copy_selected_code(with_code: Sequence[Path], *, is_dev: bool, sent: Path | None = None) -> list[CodeCopy]:
    """Copy the code that the options select. Raises as `ftkit.launch.code.copy_code` does."""
    if sent is not None:
        return read_unpacked(sent)
    return [*copy_packages(with_code), *([copy_own_package()] if is_dev else [])]


def split_script_args(words: tuple[str, ...], typed: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Separate the arguments of `ftkit run` from those of the script, which follow the first `--`."""
    args = tuple(typed[typed.index("--") + 1 :]) if "--" in typed else ()
    return words[: len(words) - len(args)], args


def say_overridden(terminal: Terminal, project: Path) -> None:
    """Name the parts of job scripts that the project overrides, before a script is printed or submitted."""
    for name in find_overrides(project):
        terminal.say(f"sbatch/{name} of this project overrides the shipped part")
