"""`ftkit images`: the training images that are defined."""

from __future__ import annotations

import click

from ftkit.cli.arguments import current_workspace, json_option, load_each
from ftkit.cli.lazy_group import ExamplesCommand
from ftkit.cli.terminal import Column, Terminal
from ftkit.specs.load import Surroundings, list_images, load_image


@click.command(
    "images",
    cls=ExamplesCommand,
    short_help="List the training images that are defined.",
    examples=("ftkit images", "ftkit images --json"),
)
@json_option
def command(*, as_json: bool) -> None:
    """List the images, with the recipe that '--image NAME:TAG' runs, and whether they were imported."""
    terminal, around, workspace = Terminal(), Surroundings.here(), current_workspace()
    images = load_each(list_images(around), lambda reference: load_image(reference, around), terminal)
    files = {reference: workspace.image_file(reference) for reference, _ in images}
    if as_json:
        terminal.json(
            [
                {
                    "reference": reference,
                    "file": str(files[reference]),
                    "is_imported": files[reference].is_file(),
                    **image.model_dump(mode="json"),
                }
                for reference, image in images
            ]
        )
        return
    terminal.table(
        (Column("IMAGE"), Column("DEFAULT RECIPE"), Column("IMPORTED"), Column("DESCRIPTION", takes_cut=True)),
        [
            (reference, image.default_recipe, "yes" if files[reference].is_file() else "no", image.description)
            for reference, image in images
        ],
    )
