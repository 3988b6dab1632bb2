"""`ftkit lock`: fix every package that an image adds to its base."""

from __future__ import annotations

import click

from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.image_arguments import image_argument
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.cli.terminal.format import plural, short_path
from ftkit.config.context import Context
from ftkit.config.load import find_image
from ftkit.images.lock import write_lock


@click.command(
    "lock",
    cls=ExamplesCommand,
    short_help="Fix the packages of an image, with hashes.",
    examples=("ftkit lock olmo3:25.02",),
)
@image_argument
def command(reference: str) -> None:
    """Resolve the packages of NAME:TAG and write its lock, with hashes.

    What the base provides (torch, triton, numpy) is never in it. Images that extend one file share its lock.
    """
    definition = find_image(reference, Context.here())
    pinned = write_lock(definition)
    where = short_path(definition.lock_file)
    Terminal().say(Styled(f"wrote {where}: {plural(len(pinned), 'package')}, each with hashes", "bold"))
