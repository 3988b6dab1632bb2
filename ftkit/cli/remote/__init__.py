"""`ftkit remote`: clusters that are reached over ssh from this machine."""

from __future__ import annotations

import click

from ftkit.cli.commands import LazyCommand, LazyGroup

_SECTIONS = {
    "Commands": (LazyCommand("setup", "ftkit.cli.remote.setup", "Install this ftkit on a cluster's login node."),),
}


@click.group(
    "remote",
    cls=LazyGroup,
    sections=_SECTIONS,
    short_help="Use a cluster from this machine, over ssh.",
    examples=("ftkit remote setup --help",),
)
def command() -> None:
    """Use a cluster from this machine, over ssh.

    A cluster profile with 'login: user@host' is reached with the system's ssh: its configuration, agent, and jump hosts
    apply. 'ftkit run' sends the recipe, local data, and the project's settings there, and submits the run there; the
    commands for runs (status, logs, cancel, resume, chat, ...) run there as if they ran here. The cluster comes from
    --cluster, FTKIT_CLUSTER, or ftkit.yaml; runs that were submitted from here are found by name.
    """
