"""`ftkit cluster create`, `status` and `destroy`: a cluster, or a VM with a GPU, by its provider's own tools."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import json_option
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Column, Terminal
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
def create_command(
    name: str, overrides: tuple[str, ...], kind: str, file: Path | None, *, dry_run: bool, yes: bool
) -> None:
    """Create a cluster of a kind, with settings from a file and KEY=VALUE arguments.

    The provider's own tools create it: gcloud, Google's Cluster Toolkit, Terraform. Repeat the command after an
    interruption to continue.
    """
    from ftkit.provision.execute import create, plan_provision
    from ftkit.provision.spec import KINDS, ProvisionState, begin_or_continue, clusters_folder, read_spec

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


@click.command(
    "status",
    cls=ExamplesCommand,
    short_help="Show what was created.",
    examples=("ftkit cluster status train1", "ftkit cluster status train1 --json"),
)
@click.argument("name")
@json_option
def status_command(name: str, *, as_json: bool) -> None:
    """Show the completed steps of a cluster, and its current state at the provider."""
    from ftkit import process
    from ftkit.provision.execute import plan_provision
    from ftkit.provision.spec import clusters_folder, read_state, restore_spec
    from ftkit.provision.steps import placed

    terminal, folder = Terminal(), clusters_folder() / name
    state = read_state(folder)
    provision = plan_provision(name, state.kind, restore_spec(state.kind, state.settings))
    outcomes = dict.fromkeys(state.found, "existed before") | dict.fromkeys(state.made, "created")
    if state.begun is not None:
        outcomes[state.begun] = "started, not finished"
    if as_json:
        terminal.json(
            {
                "name": name,
                "kind": state.kind,
                "folder": str(folder),
                "settings": state.settings,
                "steps": [
                    {"id": step.id, "title": step.title, "outcome": outcomes.get(step.id)} for step in provision.steps
                ],
            }
        )
        return
    terminal.facts(
        [("cluster", f"{name}, {state.kind}"), ("cost", provision.cost), ("folder", short_path(folder))], is_data=True
    )
    terminal.table(
        (Column("STEP"), Column("WHAT", can_shrink=True), Column("OUTCOME")),
        [(step.id, step.title, outcomes.get(step.id, "not yet")) for step in provision.steps],
    )
    for command in provision.status:
        terminal.data(process.run(placed(command, folder), timeout_seconds=120, cwd=folder).stdout)


@click.command(
    "destroy",
    cls=ExamplesCommand,
    short_help="Remove what was created.",
    examples=("ftkit cluster destroy train1 --dry-run", "ftkit cluster destroy train1 --keep-image --yes"),
)
@click.argument("name")
@click.option(
    "--keep-image", is_flag=True, help="Keep the nodes' operating system image, which takes longest to build."
)
@click.option("--dry-run", is_flag=True, help="Print what would be removed and what would stay, and remove nothing.")
@click.option("--yes", is_flag=True, help="Remove without asking.")
def destroy_command(name: str, *, keep_image: bool, dry_run: bool, yes: bool) -> None:
    """Remove what 'ftkit cluster create' created, in reverse order. Resources that existed before stay.

    What another cluster uses stays too, such as the bucket of its Terraform state: repeat the command later.

    Everything on the cluster's disks is lost: copy runs and exports elsewhere first.
    """
    from ftkit.provision.execute import destroy, is_there, plan_provision, used_by, users_of
    from ftkit.provision.spec import clusters_folder, read_state, restore_spec
    from ftkit.provision.steps import placed

    terminal, folder = Terminal(), clusters_folder() / name
    state = read_state(folder)
    provision = plan_provision(name, state.kind, restore_spec(state.kind, state.settings))
    steps = [step for step in reversed(provision.steps) if step.undo and step.id in (*state.made, state.begun)]
    if keep_image:
        steps = steps[: next((number for number, step in enumerate(steps) if step.is_image), len(steps))]
    answers: dict[tuple[str, ...], str] = {}
    users = {step: users_of(step, folder, answers) for step in steps if step.users and is_there(step, folder)}
    removed = [step for step in steps if not users.get(step)]
    terminal.facts(
        [
            ("cluster", f"{name}, {state.kind}"),
            ("removed", "; ".join(step.title for step in removed) or "nothing"),
            *(("stays", f"{step.title}, {used_by(by)}") for step, by in users.items() if by),
            ("folder", short_path(folder)),
        ],
        is_data=dry_run,
    )
    if dry_run:
        for step in removed:
            for undo in step.undo:
                terminal.data(shlex.join(placed(undo, folder)))
        return
    if not yes and not click.confirm("Remove it and everything on its disks?", err=True):
        terminal.say("removed nothing")
        return
    if destroy(provision, folder, terminal.say, keep_image=keep_image):
        terminal.say(f"removed {name}")
    else:
        terminal.say(f"removed {name}, except what is kept: repeat 'ftkit cluster destroy {name}' to remove that too")
