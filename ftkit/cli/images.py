"""`ftkit images`: list images, pin their packages, and print definition files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftkit.cli.arguments import image_argument, image_store, json_option, load_all
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Cell, Column, Styled, Terminal
from ftkit.cli.terminal.format import age, gib, short_path
from ftkit.config.context import Context, list_images
from ftkit.config.load import find_image, load_image
from ftkit.errors import plural
from ftkit.images.build_context import definition_file, write_files
from ftkit.images.inventory import image_statuses, is_unpinned
from ftkit.images.lock import write_lock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftkit.config.image import ImageSpec
    from ftkit.images.image_store import ImageStore
    from ftkit.images.inventory import ImageStatus, ImportedFile


_NO: Cell = "-"


@click.command(
    "list",
    cls=ExamplesCommand,
    examples=("ftkit images", "ftkit images --json"),
)
@json_option
def list_command(*, as_json: bool) -> None:
    """List images: the base, whether it is built, pushed and imported, its age and its size."""
    terminal, ctx, store = Terminal(), Context.here(), image_store()
    images = load_all(list_images(ctx), lambda reference: load_image(reference, ctx), terminal)
    states, has_docker = image_statuses([reference for reference, _ in images], store)
    both = list(zip((spec for _, spec in images), states, strict=True))
    if as_json:
        terminal.json([_as_json(spec, state, store) for spec, state in both])
        return
    show(both, terminal)
    if not has_docker:
        terminal.say("no docker engine answers here: BUILT and PUSHED are unknown")


def show(images: Sequence[tuple[ImageSpec, ImageStatus]], terminal: Terminal) -> None:
    """Print the table; without descriptions on a narrow terminal."""
    columns = [Column("IMAGE"), Column("BASE"), Column("BUILT"), Column("PUSHED", can_shrink=True), Column("IMPORTED")]
    rows = [
        [state.reference, _base(spec, state), _built(state), _pushed(state), _imported(state)] for spec, state in images
    ]
    if terminal.is_roomy:
        columns.append(Column("DESCRIPTION", can_shrink=True))
        rows = [[*row, spec.description] for row, (spec, _) in zip(rows, images, strict=True)]
    terminal.table(columns, rows)


def _base(spec: ImageSpec, state: ImageStatus) -> Cell:
    if spec.base.digest is None:
        return Styled("unpinned", "yellow")
    return Styled("built unpinned", "yellow") if state.built and is_unpinned(state.built) else "pinned"


def _built(state: ImageStatus) -> Cell:
    if state.built is None:
        return _NO
    return f"{gib(state.built.size / 2**30)}, {age(time.time() - state.built.created)} ago"


def _pushed(state: ImageStatus) -> Cell:
    return ", ".join(sorted({digest.partition("/")[0] for digest in state.pushed})) or _NO


def _imported(state: ImageStatus) -> Cell:
    words = ", ".join(_file(file, state) for file in state.imported)
    if any(file.manifest is None for file in state.imported):
        return Styled(words, "red")
    return (words or _NO) if state.is_current else Styled(words, "yellow")


def _file(file: ImportedFile, state: ImageStatus) -> str:
    kind = file.link.suffix.removeprefix(".")
    if file.manifest is None:
        return f"{kind} damaged, or not made by ftkit"
    is_current = state.built is None or file.manifest.image_id == state.built.id
    when = f"{age(time.time() - file.manifest.imported)} ago" if is_current else "older build"
    return f"{kind} {gib(file.size / 2**30)}, {when}"


def _as_json(spec: ImageSpec, state: ImageStatus, store: ImageStore) -> dict[str, Any]:
    built = state.built
    return {
        "reference": state.reference,
        "file": str(store.link(state.reference, "sqsh")),
        "is_imported": any(file.manifest for file in state.imported),
        "is_pinned": spec.base.digest is not None,
        "built": {"id": built.id, "size": built.size, "created": built.created, "labels": built.labels}
        if built
        else None,
        "pushed": list(state.pushed),
        "imported": [
            {
                "file": str(file.link),
                "size": file.size,
                "is_whole": file.manifest is not None,
                "image_id": file.manifest.image_id if file.manifest else None,
                "sha256": file.manifest.sha256 if file.manifest else None,
                "imported": file.manifest.imported if file.manifest else None,
            }
            for file in state.imported
        ],
        **spec.model_dump(mode="json"),
    }


@click.command(
    "definition",
    cls=ExamplesCommand,
    examples=("ftkit images definition olmo3:25.02 --files olmo3-files > olmo3.def",),
)
@image_argument
@click.option(
    "--files",
    metavar="FOLDER",
    type=click.Path(path_type=Path, file_okay=False),
    help="Also write the files that the definition copies to this folder.",
)
def definition_command(reference: str, *, files: Path | None) -> None:
    """Print a definition file that builds NAME:TAG with Apptainer or Singularity, without docker."""
    terminal, definition = Terminal(), find_image(reference, Context.here())
    text = definition_file(definition, files)
    if files:
        write_files(definition, files)
        terminal.say(f"wrote the files that the definition copies to {short_path(files.absolute())}")
    terminal.data(text)


@click.command(
    "lock",
    cls=ExamplesCommand,
    examples=("ftkit images lock olmo3:25.02",),
)
@image_argument
def lock_command(reference: str) -> None:
    """Resolve the packages of NAME:TAG and write its lock, with hashes.

    Packages of the base (torch, triton, numpy) are never in the lock. Images that extend one file share its lock.
    """
    definition = find_image(reference, Context.here())
    pinned = write_lock(definition)
    where = short_path(definition.lock_file)
    Terminal().say(Styled(f"wrote {where}: {plural(len(pinned), 'package')}, each with hashes", "bold"))
