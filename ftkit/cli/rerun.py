"""`ftkit rerun`: repeat a run, and compare its losses with the original's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import (
    check_run_name,
    complete_run,
    current_settings,
    current_workspace,
    follow_option,
    get_run,
    hf_token_option,
    job_environment,
    placement_options,
    require_signature_option,
)
from ftkit.cli.commands import ForwardedCommand, current_context
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.errors import NotRepeatedError
from ftkit.paths import is_address

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from ftkit.planning.layout import RunLayout
    from ftkit.planning.plan import RunPlan
    from ftkit.runs.repeat import Original


@click.command(
    "rerun",
    cls=ForwardedCommand,
    short_help="Repeat a run, and compare its losses with the original's.",
    examples=(
        "ftkit rerun demo",
        "ftkit rerun demo --dry-run",
    ),
    help="""Repeat a run with the same recipe, data, image and global batch. On the same cluster and GPUs all losses
    should be equal, bit for bit; on other devices a difference of up to 1% passes. Each difference is listed;
    different data or a different image is refused. At the end, the losses are compared with the original's.

    RUN selects a run as in other commands, or is the path of a manifest.json, of a bundle from 'ftkit runs bundle', or
    the address of a copy from 'ftkit runs sync' (s3://bucket/runs/RUN). For these, the profile with the cluster's name
    here is used, not the one in the manifest.
    """,
)
@click.argument("reference", metavar="RUN", shell_complete=complete_run)
@placement_options
@click.option(
    "--name",
    metavar="NAME",
    callback=check_run_name,
    help="Name of the new run; default: the recipe's name with -rerun.",
)
@click.option(
    "--allow",
    "allowed",
    metavar="PART",
    multiple=True,
    help="Accept different data, a different image, or different code.",
)
@require_signature_option("a bundle")
@click.option("--import", "does_import", is_flag=True, help="Import the image first if it is missing.")
@click.option("--dry-run", is_flag=True, help="List the differences and print the job script; submit nothing.")
@hf_token_option
@follow_option
@click.pass_obj
def command(  # noqa: PLR0913 - one for each option
    typed: list[str],
    /,
    reference: str,
    *,
    num_nodes: int | None,
    gpus_per_node: int | None,
    cluster: str | None,
    name: str | None,
    allowed: tuple[str, ...],
    public_key: Path | None,
    does_import: bool,
    dry_run: bool,
    hf_token_file: Path | None,
    follow: bool,
) -> None:
    """Repeat a run."""
    from ftkit.cli.run import SubmitRequest, make_ready, report_submission, submit_ready
    from ftkit.cli.run_script import say_overridden
    from ftkit.cli.terminal.plan_view import plan_facts
    from ftkit.launch.code import copies_of_run
    from ftkit.launch.first_rows import count_documents
    from ftkit.launch.render import render_job
    from ftkit.launch.rerun import RerunArgs, plan_rerun, repetition_record
    from ftkit.planning.layout import RunLayout
    from ftkit.runs.bundle import SIGNED_AS
    from ftkit.runs.manifest import build_manifest
    from ftkit.runs.repeat import original_to_json, read_original
    from ftkit.runs.signing import verify_beside

    terminal, ctx, workspace = Terminal(), current_context(), current_workspace()
    path = Path(reference)
    is_own = not (is_address(reference) or path.exists() or path.suffix in (".json", ".tar"))
    if public_key:
        verify_beside(path, public_key, SIGNED_AS)
    original = read_original(str(get_run(reference).layout.root) if is_own else reference)
    args = RerunArgs(cluster, num_nodes, gpus_per_node, name, is_own)
    plan = plan_rerun(original, args, ctx, workspace, current_settings().image)
    folder = get_run(reference).layout.code if is_own else RunLayout(path if path.is_dir() else path.parent).code
    copies = copies_of_run(original.manifest, folder, allows_changes="code" in allowed)
    (plan,) = count_documents([replace(plan, code=tuple(copy.plan for copy in copies))], ctx.environment)
    terminal.facts([("repeats", original.run.id), *plan_facts(plan)], is_data=False)
    if dry_run:
        _list_changes(original, plan, build_manifest(plan, ["ftkit", *typed], ctx.project), allowed, terminal)
        say_overridden(terminal, ctx.project)
        terminal.data(render_job(plan))
        return
    environment = job_environment(hf_token_file)
    ready = make_ready(plan, SubmitRequest(["ftkit", *typed], environment, copies, does_import=does_import), terminal)
    _list_changes(original, ready.plan, ready.manifest, allowed, terminal)
    ready = replace(
        ready,
        manifest={**ready.manifest, "repeats": repetition_record(original, allowed)},
        files={**ready.files, ready.plan.layout.original.name: original_to_json(original)},
    )
    run = submit_ready(ready)
    report_submission(run, terminal, does_follow=follow)
    if follow:
        report_verdict(run.layout, terminal)


def _list_changes(
    original: Original, plan: RunPlan, manifest: Mapping[str, Any], allowed: Sequence[str], terminal: Terminal
) -> None:
    """List the differences between a planned run and its original.

    Raises:
        ConfigError: some of them are not allowed.
    """
    from ftkit.launch.rerun import changed_inputs, changes_between_starts, check_inputs

    differences = changed_inputs(original, plan, manifest)
    check_inputs(differences, allowed)
    for each in differences:
        before, after = each.values
        terminal.warn(f"{each.section}: {each.key} is {after}, was {before}")
    for text in changes_between_starts(original):
        terminal.warn(text)


def report_verdict(layout: RunLayout, terminal: Terminal) -> None:
    """Report whether a run reproduced the original.

    Raises:
        NotRepeatedError: it did not.
    """
    from ftkit.runs.repeat import judge

    verdict = judge(layout)
    if verdict is None:
        return
    terminal.text(Styled(str(verdict), "green" if verdict.is_repeated else "yellow"), is_data=True)
    if verdict.beyond_step is not None:
        raise NotRepeatedError(
            f"{layout.root.name} did not reproduce {verdict.original}",
            fix=f"compare them: ftkit compare {verdict.original} {layout.root.name}",
        )
