"""`ftkit doctor`: check the login node, and nodes inside the image."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import json_option
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.shell_completion import complete_cluster, complete_image
from ftkit.cli.terminal.console import Cell, Column, Styled, Terminal
from ftkit.config.context import Context

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftkit.health.findings import Finding, Status
    from ftkit.health.site import Site

_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "failed": "red", "unknown": "cyan"}


@click.command(
    "doctor",
    cls=ExamplesCommand,
    short_help="Check the login node, and GPUs and networks of nodes.",
    examples=("ftkit doctor", "ftkit doctor --cluster mycluster --json"),
)
@click.option("--cluster", metavar="NAME", shell_complete=complete_cluster, help="A profile of 'ftkit clusters'.")
@click.option("--image", metavar="NAME:TAG", shell_complete=complete_image, help="Image to look for.")
@json_option
def command(*, cluster: str | None, image: str | None, as_json: bool) -> None:
    """Check this machine: programs, rights, disk space, credentials, registry, hub, image, clocks.

    Exits with 12 if a check failed.
    """
    from ftkit.errors import UnfitMachineError
    from ftkit.health.findings import failures

    terminal, ctx = Terminal(), Context.here()
    findings = check_here(ctx, terminal, cluster=cluster, image=image, shows=not as_json)
    failed = failures(findings)
    if as_json:
        terminal.json({"login_node": [asdict(each) for each in findings], "is_healthy": not failed})
    if failed:
        raise UnfitMachineError(f"failed: {', '.join(each.check for each in failed)}")


def check_here(
    ctx: Context,
    terminal: Terminal,
    *,
    cluster: str | None = None,
    image: str | None = None,
    site: Site | None = None,
    shows: bool = True,
) -> list[Finding]:
    """Run the checks of the login node and print them."""
    from ftkit.health.login import LoginNode, check_login_node
    from ftkit.health.site import detect_site
    from ftkit.launch.resolve import RunArgs, load_place
    from ftkit.planning.layout import Workspace

    place = load_place(RunArgs(cluster=cluster, image=image), ctx)
    node = LoginNode(
        site or detect_site(ctx.environment),
        place.cluster,
        Workspace(place.settings.workspace_folder(ctx)),
        place.image,
        place.settings.settings.registry,
        ctx.environment,
    )
    findings = check_login_node(node)
    if shows:
        show_findings(findings, terminal)
    return findings


def show_findings(findings: Sequence[Finding], terminal: Terminal) -> None:
    """Print a table of findings, then what to do about those that are not in order."""
    rows: list[list[Cell]] = [[each.check, Styled(each.status, _STYLES[each.status]), each.value] for each in findings]
    terminal.table((Column("CHECK"), Column("STATUS"), Column("FOUND", can_shrink=True)), rows)
    for each in findings:
        if each.fix and each.status != "ok":
            terminal.say(f"{each.check}: {each.fix}", indent=2)
