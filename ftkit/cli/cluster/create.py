"""`ftkit cluster create`: create a cluster, or a VM with a GPU."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Terminal
from ftkit.cli.terminal.format import short_path
from ftkit.errors import plural

if TYPE_CHECKING:
    from ftkit.provision.steps import Provision

_KINDS = ("a3-megagpu-8g", "a3-ultragpu-8g", "a4-highgpu-8g", "soperator", "gcp-vm-l4")


@click.command(
    "create",
    cls=ExamplesCommand,
    short_help="Create a cluster, or a VM with a GPU.",
    examples=(
        "ftkit cluster create vm --kind gcp-vm-l4 project=p1 zone=us-east1-b --dry-run",
        "ftkit cluster create a4 --kind a4-highgpu-8g --settings a4.yaml num_nodes=4",
    ),
)
@click.argument("name")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--kind", type=click.Choice(_KINDS), required=True, help="What to create.")
@click.option(
    "--settings",
    "file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="YAML file with settings.",
)
@click.option("--dry-run", is_flag=True, help="Print every file and command, and run nothing.")
@click.option("--yes", is_flag=True, help="Create without asking.")
def command(name: str, overrides: tuple[str, ...], kind: str, file: Path | None, *, dry_run: bool, yes: bool) -> None:
    """Create a cluster of a kind, with settings from a file and KEY=VALUE arguments.

    The provider's own tools create it: gcloud, Google's Cluster Toolkit, Terraform. Repeat the command after an
    interruption to continue.
    """
    from ftkit.provision.execute import create
    from ftkit.provision.plan import plan_provision
    from ftkit.provision.spec import KINDS, read_spec
    from ftkit.provision.state import ProvisionState, begin_or_continue, clusters_folder

    terminal = Terminal()
    known = next(each for each in KINDS if each == kind)
    spec = read_spec(known, file, overrides)
    provision, folder = plan_provision(name, known, spec), clusters_folder() / name
    if dry_run:
        terminal.data(_script(provision, folder))
        return
    new = ProvisionState(known, spec.model_dump(mode="json"))
    state = begin_or_continue(folder, new)
    left = len([step for step in provision.steps if step.id not in (*state.made, *state.found)])
    terminal.facts(
        [
            ("cluster", f"{name}, {kind}"),
            ("steps", f"{plural(left, 'step')}, about {provision.minutes} minutes in total"),
            ("cost", provision.cost),
            ("folder", short_path(folder)),
        ],
        is_data=False,
    )
    if not yes and not click.confirm("Create it?", err=True):
        terminal.say("created nothing")
        return
    create(provision, state, folder, terminal.say)
    terminal.say(f"created {name}")
    for next_step in provision.next_steps:
        terminal.say(next_step, indent=2)


def _script(provision: Provision, folder: Path) -> str:
    """Return all files and commands as a shell script."""
    from ftkit.provision.steps import placed

    def line(command: tuple[str, ...]) -> str:
        return shlex.join(placed(command, folder)) + "\n"

    parts = [f"# {provision.name}: {provision.kind}; {provision.cost}\n"]
    for path, text in provision.files.items():
        parts.append(f"\n# file {folder / path}\n" + "".join(f"#   {each}\n" for each in text.splitlines()))
    parts += [f"\n# check: {check.title}\n{line(check.command)}" for check in provision.checks]
    for step in provision.steps:
        found = f"# skipped if this prints something: {line(step.existing)}" if step.existing else ""
        parts.append(f"\n# {step.title}\n{found}{line(step.command)}")
    parts.append("\n# removed by 'ftkit cluster destroy', in this order:\n")
    for step in reversed(provision.steps):
        parts += [f"# stays if this prints something: {line(users)}" for users in step.users]
        parts += [f"# {line(undo)}" for undo in step.undo]
    return "".join(parts)
