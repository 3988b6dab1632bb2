"""`ftkit init`: detect the cluster, and write the project's settings."""

from __future__ import annotations

import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import load_all
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Cell, Styled, Terminal
from ftkit.cli.terminal.format import short_path
from ftkit.config.context import PROJECT_FILE, Context, list_names
from ftkit.errors import ConfigError, NoAnswerError, Problem

if TYPE_CHECKING:
    from ftkit.health.site import Site
    from ftkit.health.site_profile import ProposedCluster

_MARK = "Written by 'ftkit init'."
_HEAD = f"{_MARK} 'ftkit config' shows all settings; keys of a profile: docs/reference/cluster-profile.md"


@click.command(
    "init",
    cls=ExamplesCommand,
    short_help="Set up a project on this cluster or machine.",
    examples=("ftkit init", "ftkit init --yes", "ftkit init --yes --force"),
)
@click.option("--yes", is_flag=True, help="Ask nothing.")
@click.option("--force", is_flag=True, help="Change existing files. Other keys of ftkit.yaml stay.")
def command(*, yes: bool, force: bool) -> None:
    """Inspect this machine and its Slurm, and write ftkit.yaml into the current folder.

    It chooses a matching shipped profile, or writes a profile into clusters/ that extends one. Then it runs the checks
    of 'ftkit doctor'.
    """
    from ftkit.cli.doctor import check_here
    from ftkit.config.load import load_cluster
    from ftkit.health.site import detect_site
    from ftkit.health.site_profile import propose_cluster
    from ftkit.launch.resolve import RunArgs, load_place

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
    names = [name for name in list_names("cluster", ctx) if not _is_our_own(folder / "clusters" / f"{name}.yaml")]
    profiles = load_all(names, lambda name: load_cluster(name, ctx), terminal)
    proposed = propose_cluster(site, (spec for _, spec in profiles))
    terminal.facts(_site_facts(site, proposed), is_data=False)
    files = _files(folder, proposed)
    existing = [path for path in files if path.exists()]
    if existing and not force:
        _confirm_or_refuse(existing, yes=yes)
    elif not yes and sys.stdin.isatty():
        click.confirm(f"Write {', '.join(short_path(path) for path in files)}?", default=True, abort=True, err=True)
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        terminal.say(f"wrote {short_path(path)}")
    for each in (*site.unknown, *proposed.unknown):
        terminal.warn(f"not detected: {each}")
    terminal.say()
    written = Context.here()
    check_here(written, load_place(RunArgs(), written), terminal, site=site)
    terminal.say(Styled(f"\nTry: {_next_command(proposed)}", "bold"))


def _is_our_own(path: Path) -> bool:
    """Return whether an earlier `ftkit init` wrote this profile, so that it may be overwritten."""
    return path.is_file() and path.read_text(encoding="utf-8", errors="replace").startswith(f"# {_MARK}")


def _confirm_or_refuse(existing: list[Path], *, yes: bool) -> None:
    """Ask whether files may be changed; refuse if input is not a terminal.

    Raises:
        ConfigError: there is no terminal to ask on.
    """
    if not yes and sys.stdin.isatty():
        names = " and ".join(short_path(path) for path in existing)
        click.confirm(f"Change existing {names}?", default=False, abort=True, err=True)
        return
    raise ConfigError(
        [Problem(short_path(path), "", "already exists and was not changed.", "Change it with --force.")
         for path in existing]
    )  # fmt: skip


def _site_facts(site: Site, proposed: ProposedCluster) -> list[tuple[str, Cell]]:
    facts: list[tuple[str, Cell]] = []
    if site.has_slurm:
        names = list(dict.fromkeys(each.name for each in site.partitions))
        facts.append(("Slurm", f"{site.slurm_version}, partitions {', '.join(names)}"))
    programs = {"enroot": site.enroot, "Apptainer": site.apptainer, "docker": site.docker}
    found = [*(["pyxis"] if site.has_pyxis else []), *(f"{key} {value}" for key, value in programs.items() if value)]
    facts.append(("containers", ", ".join(found) or "none found"))
    if not site.has_slurm:
        facts.append(("GPUs here", str(site.num_gpus)))
    if site.networks:
        facts.append(("network", ", ".join(site.networks)))
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


def _edited(path: Path | None, values: dict[str, object], head: str = _HEAD) -> str:
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap

    from ftkit.config.yaml_files import read_yaml

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


def _next_command(proposed: ProposedCluster) -> str:
    if proposed.values.get("runtime") == "none" or proposed.name == "local":
        return "ftkit run demo"
    nodes = min(2, proposed.values.get("max_nodes", 2))
    return "ftkit run --image olmo3:25.02" + ("" if proposed.name == "docker" else f" --nodes {nodes}")
