"""`ftkit images lock`: pin every package that an image adds to its base."""

from __future__ import annotations

import click

from ftkit.cli.arguments import image_argument
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.cli.terminal.format import short_path
from ftkit.config.context import Context
from ftkit.errors import plural


@click.command(
    "lock",
    cls=ExamplesCommand,
    short_help="Pin an image's packages, with hashes.",
    examples=("ftkit images lock olmo3:25.02",),
)
@image_argument
def command(reference: str) -> None:
    """Resolve the packages of NAME:TAG and write its lock, with hashes.

    Packages of the base (torch, triton, numpy) are never in the lock. Images that extend one file share its lock.
    """
    from ftkit.config.load import find_image
    from ftkit.images.lock import write_lock

    definition = find_image(reference, Context.here())
    pinned = write_lock(definition)
    where = short_path(definition.lock_file)
    Terminal().say(Styled(f"wrote {where}: {plural(len(pinned), 'package')}, each with hashes", "bold"))
