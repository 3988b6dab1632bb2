"""`ftkit doctor`: check the login node, and nodes inside the image."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ftkit.cli.arguments import complete_cluster, complete_image, json_option
from ftkit.cli.commands import ForwardedCommand, current_context
from ftkit.cli.terminal.console import Cell, Column, Styled, Terminal
from ftkit.errors import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftkit.config.context import Context
    from ftkit.health.findings import Finding, Status
    from ftkit.health.site import Site
    from ftkit.launch.doctor import NodeResult
    from ftkit.launch.resolve import Place

_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "failed": "red", "unknown": "cyan"}


class _NumNodes(click.ParamType):  # type: ignore[type-arg] # click 8.2 has no type argument
    """A number of nodes, or `all`."""

    name = "nodes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value != "all" and not (str(value).isdigit() and int(value) > 0):
            self.fail("give a number of nodes, or 'all'", param, ctx)
        return "all" if value == "all" else int(value)


@click.command(
    "doctor",
    cls=ForwardedCommand,
    short_help="Check the login node, and GPUs and networks of nodes.",
    examples=("ftkit doctor", "ftkit doctor --cluster mycluster --json"),
)
@click.option(
    "--cluster",
    metavar="NAME",
    shell_complete=complete_cluster,
    help="Cluster profile ('ftkit cluster list' lists them). [env var: FTKIT_CLUSTER]",
)
@click.option("--image", metavar="NAME:TAG", shell_complete=complete_image, help="Image to check nodes in.")
@click.option("--nodes", metavar="N|all", type=_NumNodes(), help="Also check N nodes, or all idle ones, in a job.")
@json_option
def command(*, cluster: str | None, image: str | None, nodes: int | str | None, as_json: bool) -> None:
    """Check this machine: programs, permissions, disk space, credentials, registry, hub, image, clocks.

    With --nodes, a job then checks nodes inside the image: whether the container starts, GPUs, driver, memory errors,
    clocks, disks, the speed of matmuls and collectives, and pairs of nodes. Exits with code 12 if a check fails.
    """
    from ftkit.errors import UnfitMachineError
    from ftkit.health.findings import failures
    from ftkit.launch.resolve import RunArgs, load_place

    terminal, ctx = Terminal(), current_context()
    place = load_place(RunArgs(cluster=cluster, image=image), ctx)
    findings = check_here(ctx, place, terminal, shows=not as_json)
    results = _check_nodes(nodes, place, ctx, terminal) if nodes else []
    failed = [each.check for each in failures(findings)]
    bad = [each.host for each in results if each.problem]
    if as_json:
        reports = [asdict(each) for each in results]
        is_healthy = not failed and not bad
        here = [asdict(each) for each in findings]
        terminal.json({"login_node": here, "nodes": reports, "exclude": bad, "is_healthy": is_healthy})
    elif results:
        terminal.text(is_data=True)
        _show_nodes(results, terminal)
    if failed or bad:
        nodes_failed = [f"nodes {', '.join(bad)} (to avoid them: sbatch --exclude={','.join(bad)})"] if bad else []
        raise UnfitMachineError(f"failed: {', '.join([*failed, *nodes_failed])}")


def check_here(
    ctx: Context, place: Place, terminal: Terminal, *, site: Site | None = None, shows: bool = True
) -> list[Finding]:
    """Run the checks of the login node and print them."""
    from ftkit.health.login import LoginNode, check_login_node
    from ftkit.health.site import detect_site
    from ftkit.planning.layout import Workspace

    node = LoginNode(
        site or detect_site(ctx.environment, ctx.root),
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
    """Print a table of findings, then a remedy for each failure and warning."""
    rows: list[list[Cell]] = [[each.check, Styled(each.status, _STYLES[each.status]), each.value] for each in findings]
    terminal.table((Column("CHECK"), Column("STATUS"), Column("FOUND", can_shrink=True)), rows)
    for each in findings:
        if each.fix and each.status != "ok":
            terminal.say(f"{each.check}: {each.fix}", indent=2)


def _check_nodes(nodes: int | str, place: Place, ctx: Context, terminal: Terminal) -> list[NodeResult]:
    """Run the checks on Slurm nodes.

    Raises:
        ConfigError: the cluster does not use Slurm, or needs an image.
        PrerequisiteError: no node is idle.
    """
    import sys

    from ftkit.errors import ConfigError, PrerequisiteError, Problem
    from ftkit.launch.doctor import check_nodes, checks_folder, idle_nodes
    from ftkit.launch.render import NodeChecks
    from ftkit.planning.job import PlacementPlan
    from ftkit.planning.planner import container_image

    cluster = place.cluster
    if cluster.scheduler != "slurm" or cluster.device == "auto":
        fix = "On this machine, in the Python or the image that trains: python -m ftkit.health"
        raise ConfigError([Problem("", "--nodes", f"cluster '{cluster.name}' does not use Slurm.", fix)])
    if cluster.runtime != "none" and place.image is None:
        raise ConfigError([Problem("", "--image", "nodes are checked inside an image.", "Give --image NAME:TAG.")])
    hosts: list[str] = []
    if nodes == "all":
        hosts, num_busy = idle_nodes(cluster)
        if num_busy:
            terminal.warn(f"skipping {plural(num_busy, 'node')} that are not idle")
        if not hosts:
            raise PrerequisiteError("no node is idle", fix="wait until jobs end, or queue for some nodes: --nodes 1")
    num_nodes = len(hosts) or int(nodes)
    terminal.say(f"checking {plural(num_nodes, 'node')} in a job, which takes about a minute once Slurm starts it")
    threads = max(1, (cluster.cpus_per_node or cluster.gpus_per_node) // cluster.gpus_per_node)
    workspace = place.settings.workspace_folder(ctx)
    with checks_folder(workspace) as folder:
        checks = NodeChecks(
            cluster,
            PlacementPlan(num_nodes, cluster.gpus_per_node, cluster.device, threads),
            workspace,
            sys.executable if cluster.runtime == "none" else "python3",
            container_image(cluster, place.image, workspace),
            folder,
        )
        return check_nodes(checks, hosts, os.environ)


def _show_nodes(results: Sequence[NodeResult], terminal: Terminal) -> None:
    """Print a line for each node, then each failure and warning."""
    columns = (
        Column("NODE"),
        Column("STATUS"),
        Column("TFLOP/S", is_number=True),
        Column("WITHIN GB/S", is_number=True),
        Column("BETWEEN GB/S", is_number=True),
        Column("BEST PAIR GB/S", is_number=True),
    )
    rows: list[list[Cell]] = []
    for each in results:
        report = each.report or {}
        rates = [device["matmul"] for device in report.get("devices") or ()]
        status = Styled("failed", "red") if each.problem else Styled("ok", "green")
        groups = [report.get(name) or {} for name in ("within", "between")]
        numbers = [
            min(rates, default=None),
            *(group.get("all_reduce") for group in groups),
            max((report.get("pairs") or {}).values(), default=None),
        ]
        rows.append([each.host, status, *("-" if number is None else f"{number:,.3g}" for number in numbers)])
    terminal.table(columns, rows)
    for each in results:
        findings = (each.report or {}).get("findings", [])
        for found in findings:
            if found["status"] in ("failed", "warning"):
                gpu = "" if found["gpu"] is None else f" GPU {found['gpu']}"
                fix = f" ({found['fix']})" if found["fix"] else ""
                style = _STYLES[found["status"]]
                terminal.text(Styled(f"{each.host}{gpu} {found['check']}: {found['value']}{fix}", style), is_data=True)
        if not findings:
            terminal.text(Styled(f"{each.host}: {each.problem}", "red"), is_data=True)
