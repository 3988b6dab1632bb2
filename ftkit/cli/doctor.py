"""`ftkit doctor`: check this machine, and nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import cluster_option, image_option, json_option
from ftkit.cli.commands import current_context
from ftkit.cli.forwarded import forwarded_command
from ftkit.cli.terminal.console import Cell, Styled, Terminal
from ftkit.cli.terminal.plan_view import say_overridden
from ftkit.errors import ConfigError, PrerequisiteError, Problem, UnfitMachineError, plural
from ftkit.health.findings import Finding, Status, failures
from ftkit.health.login_node import LoginNode, check_login_node
from ftkit.health.site import Site, detect_site
from ftkit.launch.render import NodeChecks
from ftkit.launch.resolve import Place, RunArgs, load_place
from ftkit.launch.side_jobs import NodeResult, check_nodes, checks_folder, idle_nodes
from ftkit.planning.layout import Workspace
from ftkit.planning.plan import PlacementPlan
from ftkit.planning.planner import container_image

if TYPE_CHECKING:
    from ftkit.config.context import Context

_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "failed": "red", "unknown": "cyan"}


def _num_nodes(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value not in (None, "all") and not (value.isdigit() and int(value) > 0):
        raise click.BadParameter("give a number of nodes, or 'all'", ctx, param)
    return value


@forwarded_command("doctor", "ftkit doctor", "ftkit doctor --cluster mycluster --json")
@cluster_option
@image_option("Image to check nodes in.")
@click.option("--nodes", metavar="N|all", callback=_num_nodes, help="Also check N nodes, or all idle ones, in a job.")
@json_option
def doctor_command(*, cluster: str | None, image: str | None, nodes: str | None, as_json: bool) -> None:
    """Check this machine: programs, permissions, disk space, credentials, registry, hub, image, clocks.

    With --nodes, a job then checks nodes inside the image: whether the container starts, GPUs, driver, memory errors,
    clocks, disks, the speed of matmuls and collectives, and pairs of nodes. Exits with code 12 if a check fails.
    """
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
        terminal.text()
        _show_nodes(results, terminal)
    if failed or bad:
        nodes_failed = [f"nodes {', '.join(bad)} (to avoid them: sbatch --exclude={','.join(bad)})"] if bad else []
        raise UnfitMachineError(f"failed: {', '.join([*failed, *nodes_failed])}")


def check_here(
    ctx: Context, place: Place, terminal: Terminal, *, site: Site | None = None, shows: bool = True
) -> list[Finding]:
    """Run the checks of the login node; print a table of findings, then a remedy for each failure and warning."""
    node = LoginNode(
        site or detect_site(ctx.environment, ctx.root), place.cluster, Workspace(place.settings.workspace_folder(ctx)),
        place.image, place.settings.settings.registry, ctx.environment,
    )  # fmt: skip
    findings = check_login_node(node)
    if not shows:
        return findings
    rows: list[list[Cell]] = [[each.check, Styled(each.status, _STYLES[each.status]), each.value] for each in findings]
    terminal.table(("CHECK", "STATUS", "FOUND…"), rows)
    for each in findings:
        if each.fix and each.status != "ok":
            terminal.say(f"{each.check}: {each.fix}", indent=2)
    return findings


def _check_nodes(nodes: str, place: Place, ctx: Context, terminal: Terminal) -> list[NodeResult]:
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
    threads = max(1, (cluster.cpus_per_node or cluster.max_processes) // cluster.max_processes)
    workspace = place.settings.workspace_folder(ctx)
    with checks_folder(workspace) as folder:
        checks = NodeChecks(
            cluster, PlacementPlan(num_nodes, cluster.max_processes, cluster.device, threads), workspace,
            sys.executable if cluster.runtime == "none" else "python3",
            container_image(cluster, place.image, workspace), folder,
        )  # fmt: skip
        say_overridden(terminal, ctx.project)
        return check_nodes(checks, hosts, os.environ, ctx.project)


def _show_nodes(results: Sequence[NodeResult], terminal: Terminal) -> None:
    rows: list[list[Cell]] = []
    for each in results:
        report = each.report or {}
        rates = [device["matmul"] for device in report.get("devices") or ()]
        status = Styled("failed", "red") if each.problem else Styled("ok", "green")
        groups = [report.get(name) or {} for name in ("within", "between")]
        best_pair = max((report.get("pairs") or {}).values(), default=None)
        numbers = [min(rates, default=None), *(group.get("all_reduce") for group in groups), best_pair]
        rows.append([each.host, status, *("-" if number is None else f"{number:,.3g}" for number in numbers)])
    terminal.table(("NODE", "STATUS", "#TFLOP/S", "#WITHIN GB/S", "#BETWEEN GB/S", "#BEST PAIR GB/S"), rows)
    for each in results:
        findings = (each.report or {}).get("findings", [])
        for found in findings:
            if found["status"] in ("failed", "warning"):
                gpu = "" if found["gpu"] is None else f" GPU {found['gpu']}"
                fix = f" ({found['fix']})" if found["fix"] else ""
                style = _STYLES[found["status"]]
                terminal.text(Styled(f"{each.host}{gpu} {found['check']}: {found['value']}{fix}", style))
        if not findings:
            terminal.text(Styled(f"{each.host}: {each.problem}", "red"))
