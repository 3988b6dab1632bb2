"""`ftkit cluster`: create a cluster with its provider's own tools, and remove it."""

from __future__ import annotations

import click

from ftkit.cli.commands import LazyCommand, LazyGroup

_SECTIONS = {
    "Commands": (
        LazyCommand("create", "ftkit.cli.cluster.create", "Create a cluster, or a VM with a GPU."),
        LazyCommand("status", "ftkit.cli.cluster.status", "Show what was created."),
        LazyCommand("destroy", "ftkit.cli.cluster.destroy", "Remove what was created."),
    ),
}


@click.group(
    "cluster",
    cls=LazyGroup,
    sections=_SECTIONS,
    short_help="Create a cluster or a GPU VM, and remove it.",
    examples=("ftkit cluster create --help", "ftkit cluster destroy --help"),
)
def command() -> None:
    """Create a cluster with its provider's own tools, and remove it.

    --dry-run shows every file and command. Created resources are recorded, so an interrupted command
    continues, and 'destroy' removes exactly those.
    """
