"""`ftkit images definition`: print an image's Singularity definition file."""

from __future__ import annotations

from pathlib import Path

import click

from ftkit.cli.arguments import image_argument
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Terminal
from ftkit.cli.terminal.format import short_path
from ftkit.config.context import Context


@click.command(
    "definition",
    cls=ExamplesCommand,
    short_help="Print an image's Singularity definition file.",
    examples=("ftkit images definition olmo3:25.02 --files olmo3-files > olmo3.def",),
)
@image_argument
@click.option(
    "--files",
    metavar="FOLDER",
    type=click.Path(path_type=Path, file_okay=False),
    help="Also write the files that the definition copies to this folder.",
)
def command(reference: str, *, files: Path | None) -> None:
    """Print a definition file that builds NAME:TAG with Apptainer or Singularity, without docker."""
    from ftkit.config.load import find_image
    from ftkit.images.sif import definition_file, write_files

    terminal, definition = Terminal(), find_image(reference, Context.here())
    text = definition_file(definition, files)
    if files:
        write_files(definition, files)
        terminal.say(f"wrote the files that the definition copies to {short_path(files.absolute())}")
    terminal.data(text)
