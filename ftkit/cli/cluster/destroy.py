"""`ftkit cluster destroy`: remove what was created."""

from __future__ import annotations

import click

from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Terminal
from ftkit.cli.terminal.format import short_path


@click.command(
    "destroy",
    cls=ExamplesCommand,
    short_help="Remove what was created.",
    examples=("ftkit cluster destroy train1", "ftkit cluster destroy train1 --keep-image --yes"),
)
@click.argument("name")
@click.option(
    "--keep-image", is_flag=True, help="Keep the nodes' operating system image, which takes longest to build."
)
@click.option("--yes", is_flag=True, help="Remove without asking.")
def command(name: str, *, keep_image: bool, yes: bool) -> None:
    """Remove what 'ftkit cluster create' created, in reverse order. Resources that existed before stay.

    Everything on the cluster's disks is lost: copy runs and exports elsewhere first.
    """
    from ftkit.provision.execute import destroy
    from ftkit.provision.plan import plan_provision
    from ftkit.provision.spec import restore_spec
    from ftkit.provision.state import clusters_folder, read_state

    terminal, folder = Terminal(), clusters_folder() / name
    state = read_state(folder)
    provision = plan_provision(name, state.kind, restore_spec(state.kind, state.settings))
    made = [step.title for step in provision.steps if step.undo and step.id in (*state.made, state.begun)]
    terminal.facts(
        [("cluster", f"{name}, {state.kind}"), ("removed", "; ".join(made) or "nothing was created"),
         ("folder", short_path(folder))],
        is_data=False,
    )  # fmt: skip
    if not yes and not click.confirm("Remove it and everything on its disks?", err=True):
        terminal.say("removed nothing")
        return
    destroy(provision, folder, terminal.say, keep_image=keep_image)
    terminal.say(f"removed {name}" + (", except its image" if keep_image else ""))
