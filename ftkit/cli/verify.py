"""`ftkit verify`: verify an imported image against its manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.image_arguments import image_store
from ftkit.cli.shell_completion import complete_image
from ftkit.cli.signing_options import require_signature_option
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.cli.terminal.format import gib

if TYPE_CHECKING:
    from ftkit.config.image_reference import AnyImage


@click.command(
    "verify",
    cls=ExamplesCommand,
    short_help="Verify an imported image against its manifest.",
    examples=("ftkit verify olmo3:25.02", "ftkit verify /shared/images/olmo3+25.02.sqsh --deep"),
)
@click.argument("wanted", metavar="NAME:TAG|FILE|URI", shell_complete=complete_image)
@click.option("--deep", is_flag=True, help="Also run the self-check inside the image.")
@require_signature_option("a file")
def command(wanted: str, *, deep: bool, public_key: Path | None) -> None:
    """Recompute the digests of an imported image; list every difference, and exit with code 10 if there is any."""
    from ftkit.cli.terminal.progress_view import ProgressView
    from ftkit.config.image_reference import ImageFile, parse_image
    from ftkit.images.signatures import require_beside
    from ftkit.images.verify import require_intact, verify, verify_inside

    terminal = Terminal()
    image = parse_image(wanted, Path.cwd(), key="NAME:TAG|FILE|URI")
    file = _file(image)
    with ProgressView(terminal) as view:
        program = require_beside(file, public_key) if public_key else None
        result = verify(file, view.report, name="NAME:TAG" if isinstance(image, ImageFile) else wanted)
        require_intact(result)
        left = verify_inside(file, result.manifest, view.report) if deep else ""
    manifest = result.manifest
    terminal.facts(
        (
            ("file", str(file)),
            ("image", f"{manifest.reference}, {manifest.image_id}"),
            ("sha256", manifest.sha256),
            ("size", gib(manifest.size / 2**30)),
            ("from", manifest.source),
        ),
        is_data=True,
    )
    terminal.say(Styled("the file matches its manifest", "green"))
    if program:
        terminal.say(Styled(f"the manifest is signed, verified by {program}", "green"))
    if left:
        terminal.say(left)


def _file(image: AnyImage) -> Path:
    from ftkit.config.image_reference import ImageFile, RegistryImage, parse_name

    if isinstance(image, ImageFile):
        return image.path
    named = parse_name((image.named if isinstance(image, RegistryImage) else image).reference)
    store = image_store()
    sqsh, sif = store.link(named.reference, "sqsh"), store.link(named.reference, "sif")
    return sif if sif.exists() and not sqsh.exists() else sqsh
