"""`ftkit run --script`, and the options for the user's own code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftkit.cli.terminal.format import short_path
from ftkit.errors import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftkit.cli.run import SubmitRequest
    from ftkit.cli.terminal.console import Cell, Terminal
    from ftkit.launch.code import CodeCopy
    from ftkit.launch.resolve import RunArgs
    from ftkit.launch.script import ScriptArgs
    from ftkit.planning.script import ScriptPlan
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


def code_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options about the user's code."""
    for option in reversed(_CODE_OPTIONS):
        function = option(function)
    return function


def script_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options about a script."""
    for option in reversed(_SCRIPT_OPTIONS):
        function = option(function)
    return function


def copy_selected_code(with_code: Sequence[Path], *, is_dev: bool, sent: Path | None = None) -> list[CodeCopy]:
    """Copy the code that the options select. Raises as `ftkit.launch.code.copy_code` does."""
    if not with_code and not is_dev and sent is None:
        return []
    from ftkit.launch.code import copy_own_package, copy_packages, read_unpacked

    if sent is not None:
        return read_unpacked(sent)
    return [*copy_packages(with_code), *([copy_own_package()] if is_dev else [])]


def split_script_args(words: tuple[str, ...], typed: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Separate the arguments of `ftkit run` from those of the script, which follow the first `--`."""
    own = typed.index("--") if "--" in typed else len(typed)
    args = tuple(typed[own + 1 :])
    return words[: len(words) - len(args)], args


def script_facts(plan: ScriptPlan) -> list[tuple[str, Cell]]:
    """Return the rows of a script's plan, for the table."""
    from ftkit.cli.terminal.plan_view import code_facts, describe_placement, describe_runtime

    script = plan.script
    facts: list[tuple[str, Cell]] = [
        ("run", plan.id),
        ("script", " ".join([script.path, *script.args])),
        *code_facts(plan.code),
        ("processes", describe_placement(plan)),
        ("accelerate", _accelerate(plan)),
        ("when stopped", _stop(plan)),
        ("cluster", f"{plan.cluster.name}: {plan.cluster.scheduler}, {describe_runtime(plan)}"),
        ("run folder", short_path(plan.layout.root)),
    ]
    return [*facts, ("image", plan.image)] if plan.image else facts


def _accelerate(plan: ScriptPlan) -> str:
    config = plan.script.accelerate
    if config is None:
        return "no configuration: accelerate and the Trainer replicate the model in every process"
    source = f"from recipe {plan.script.recipe}" if plan.script.recipe else "as given"
    return f"{config.get('distributed_type', 'NO')}, {config.get('mixed_precision', 'no')}, {source}: accelerate.json"


def _stop(plan: ScriptPlan) -> str:
    script = plan.script
    signal = "nothing is sent" if script.stop_signal == "none" else f"SIG{script.stop_signal} is sent to the script"
    again = "restarted, to continue from its checkpoint" if script.can_restart else "not restarted (--requeue)"
    restarts = f"; up to {plural(script.resources.max_restarts, 'restart')} after a crash" * script.can_restart
    return f"{signal}; it is {again}{restarts}"


def say_overridden(terminal: Terminal, project: Path) -> None:
    """Name the parts of job scripts that the project overrides, before a script is printed or submitted."""
    from ftkit.launch.templates import find_overrides

    for name in find_overrides(project):
        terminal.say(f"sbatch/{name} of this project overrides the shipped part")


def run_script(
    script: ScriptArgs, run: RunArgs, request: SubmitRequest, terminal: Terminal, *, dry_run: bool
) -> SubmittedRun | None:
    """Plan a run of a script, check its image, and submit it; None if only its job script was printed.

    Args:
        script: the script with its arguments.
        run: its placement, and the recipe from whose plan accelerate's configuration is made.
        request: how to submit it.
        terminal: destination of messages.
        dry_run: whether only to print the job script.

    Raises:
        FtkitError: the run would fail.
    """
    from ftkit.cli.commands import current_context
    from ftkit.cli.image_check import check_image
    from ftkit.cli.terminal.plan_view import show_findings
    from ftkit.launch.code import files_of
    from ftkit.launch.jobs import NewJob, submit
    from ftkit.launch.preflight import run_script_checks
    from ftkit.launch.render import render_job
    from ftkit.launch.resolve import resolve_image_link
    from ftkit.launch.script import accelerate_json, resolve_script
    from ftkit.launch.templates import OVERRIDDEN_PARTS, find_overrides
    from ftkit.runs.manifest import build_manifest, uncommitted_changes

    ctx = current_context()
    plan, copies = resolve_script(script, run, request.copies, ctx)
    terminal.facts(script_facts(plan), is_data=False)
    say_overridden(terminal, ctx.project)
    if dry_run:
        terminal.data(render_job(plan, ctx.project))
        return None
    show_findings(run_script_checks(plan, request.environment), terminal)
    image_facts = check_image(plan, terminal, does_import=request.does_import)
    plan = resolve_image_link(plan)
    texts = {
        plan.layout.code_changes.name: uncommitted_changes(),
        plan.layout.accelerate_config.name: accelerate_json(plan),
    }
    files = {**files_of(copies), **{name: text for name, text in texts.items() if text}}
    parts = {OVERRIDDEN_PARTS: find_overrides(ctx.project)}
    manifest = build_manifest(plan, request.command, ctx.project) | image_facts | parts
    return submit(NewJob(plan, render_job(plan, ctx.project), manifest, request.environment, files=files))
