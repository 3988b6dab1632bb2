"""`ftkit cluster destroy`: remove what was created."""

from __future__ import annotations

import shlex

import click

from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Terminal
from ftkit.cli.terminal.format import short_path


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
def command(name: str, *, keep_image: bool, dry_run: bool, yes: bool) -> None:
    """Remove what 'ftkit cluster create' created, in reverse order. Resources that existed before stay.

    What another cluster uses stays too, such as the bucket of its Terraform state: repeat the command later.

    Everything on the cluster's disks is lost: copy runs and exports elsewhere first.
    """
    from ftkit.provision.execute import destroy, is_there, used_by, users_of
    from ftkit.provision.plan import plan_provision
    from ftkit.provision.spec import restore_spec
    from ftkit.provision.state import clusters_folder, read_state
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
