"""`ftkit init` and `ftkit doctor`: set up a project on this machine, and check machine and nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import click
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from ftkit.cli.arguments import cluster_option, image_option, json_option, load_all, yes_option
from ftkit.cli.commands import command, current_context
from ftkit.cli.forwarded import forwarded_command
from ftkit.cli.submit import say_overridden
from ftkit.cli.terminal.console import Cell, Facts, Styled, Terminal
from ftkit.cli.terminal.format import short_path
from ftkit.config.context import PROJECT_FILE, Context, list_names
from ftkit.config.load import load_cluster
from ftkit.config.yaml_files import read_yaml
from ftkit.errors import ConfigError, NoAnswerError, PrerequisiteError, Problem, UnfitMachineError, plural
from ftkit.health.findings import Finding, Status, failures
from ftkit.health.login_node import LoginNode, check_login_node
from ftkit.health.site import ProposedCluster, Site, detect_site, propose_cluster
from ftkit.launch.render import NodeChecks
from ftkit.launch.resolve import Place, RunArgs, load_place
from ftkit.launch.side_jobs import NodeResult, check_nodes, checks_folder, idle_nodes
from ftkit.planning.layout import Workspace
from ftkit.planning.plan import PlacementPlan
from ftkit.planning.planner import container_image

_MARK = "Written by 'ftkit init'."
_HEAD = f"{_MARK} 'ftkit config' shows all settings; keys of a profile: docs/reference/cluster-profile.md"


@command("init", "ftkit init", "ftkit init --yes", "ftkit init --yes --force")
@yes_option
@click.option("--force", is_flag=True, help="Change existing files. Other keys of ftkit.yaml stay.")
def init_command(*, yes: bool, force: bool) -> None:
    """Inspect this machine and its Slurm, and write ftkit.yaml into the current folder.

    It chooses a matching shipped profile, or writes a profile into clusters/ that extends one. Then it runs the checks
    of 'ftkit doctor'.
    """
    terminal, here = Terminal(), Context.here()
    folder = Path.cwd()
    ctx = replace(here, project=folder)
    site = detect_site(ctx.environment, ctx.root)
    if site.is_slurm_silent:
        raise NoAnswerError(
            "Slurm did not respond, and nothing was written",
            meaning="its programs are installed here; its controller is busy, restarting, or not reachable",
            fix=f"try again in a minute; to train on this machine alone, write 'cluster: local' into {PROJECT_FILE}",
        )
    # A profile that an earlier 'ftkit init' wrote may be overwritten.
    own = [
        path.stem for path in (folder / "clusters").glob("*.yaml")
        if path.read_text(encoding="utf-8", errors="replace").startswith(f"# {_MARK}")
    ]  # fmt: skip
    names = [name for name in list_names("cluster", ctx) if name not in own]
    profiles = load_all(names, lambda name: load_cluster(name, ctx), terminal)
    proposed = propose_cluster(site, (spec for _, spec in profiles))
    terminal.facts(_site_facts(site, proposed), is_data=False)
    files = _files(folder, proposed)
    asks = not yes and sys.stdin.isatty()
    existing = [short_path(path) for path in files if path.exists()]
    if existing and not force:
        if not asks:
            what, fix = "already exists and was not changed.", "Change it with --force."
            raise ConfigError([Problem(path, "", what, fix) for path in existing])
        click.confirm(f"Change existing {' and '.join(existing)}?", default=False, abort=True, err=True)
    elif asks:
        click.confirm(f"Write {', '.join(map(short_path, files))}?", default=True, abort=True, err=True)
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        terminal.say(f"wrote {short_path(path)}")
    for each in (*site.unknown, *proposed.unknown):
        terminal.warn(f"not detected: {each}")
    terminal.say()
    written = Context.here()
    _check_here(written, load_place(RunArgs(), written), terminal, site=site)
    command = "ftkit run demo"
    if proposed.values.get("runtime") != "none" and proposed.name != "local":
        nodes = "" if proposed.name == "docker" else f" --nodes {min(2, proposed.values.get('max_nodes', 2))}"
        command = f"ftkit run --image olmo3:25.02{nodes}"
    terminal.say(Styled(f"\nTry: {command}", "bold"))


def _site_facts(site: Site, proposed: ProposedCluster) -> Facts:
    facts: Facts = []
    if site.has_slurm:
        names = list(dict.fromkeys(each.name for each in site.partitions))
        facts.append(("Slurm", f"{site.slurm_version}, partitions {', '.join(names)}"))
    programs = {"enroot": site.enroot, "Apptainer": site.apptainer, "docker": site.docker}
    found = [*(["pyxis"] if site.has_pyxis else []), *(f"{key} {value}" for key, value in programs.items() if value)]
    facts.append(("containers", ", ".join(found) or "none found"))
    if not site.has_slurm:
        facts.append(("GPUs here", str(site.num_gpus)))
    if site.shared_folders:
        facts.append(("shared", ", ".join(site.shared_folders)))
    chosen = f"{proposed.name}, which extends {proposed.extends}" if proposed.extends else proposed.name
    facts.append(("cluster", Styled(f"{chosen}: {proposed.reason}", "bold")))
    facts += [(f"  {key}", str(value)) for key, value in proposed.values.items() if key != "description"]
    return facts


def _files(folder: Path, proposed: ProposedCluster) -> dict[Path, str]:
    """Return the files to write, with their content; an existing ftkit.yaml keeps its other keys and its comments."""
    settings = folder / PROJECT_FILE
    files = {settings: _edited(settings, {"cluster": proposed.name})}
    if proposed.extends:
        profile = {"name": proposed.name, "extends": proposed.extends, **proposed.values}
        undetected = [f"Not detected: {each}" for each in proposed.unknown]
        files[folder / "clusters" / f"{proposed.name}.yaml"] = _edited(None, profile, "\n".join([_HEAD, *undetected]))
    return files


def _edited(path: Path | None, values: Mapping[str, object], head: str = _HEAD) -> str:
    yaml, document = YAML(), CommentedMap()
    yaml.width = 200
    if path is not None and path.is_file():
        read_yaml(path)  # raises ftkit's error for invalid YAML
        document = yaml.load(path.read_text(encoding="utf-8")) or document
    else:
        document.yaml_set_start_comment(head)
    document.update(values)
    text = StringIO()
    yaml.dump(document, text)
    return text.getvalue()


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
    findings = _check_here(ctx, place, terminal, shows=not as_json)
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


def _check_here(
    ctx: Context, place: Place, terminal: Terminal, *, site: Site | None = None, shows: bool = True
) -> list[Finding]:
    """Run the checks of the login node; print a table of findings, then a remedy for each failure and warning."""
    node = LoginNode(
        site or detect_site(ctx.environment, ctx.root),
        place.cluster,
        Workspace(place.settings.workspace_folder(ctx)),
        place.image,
        place.settings.settings.registry,
        ctx.environment,
    )
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
