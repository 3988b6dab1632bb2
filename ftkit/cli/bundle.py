"""`ftkit runs bundle`: write a run's inputs and results into one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftkit.cli.arguments import RUN_HELP, get_run, run_argument, signing_key, signing_options
from ftkit.cli.commands import ForwardedCommand
from ftkit.cli.terminal.console import Terminal
from ftkit.cli.terminal.format import short_path

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout


@click.command(
    "bundle",
    cls=ForwardedCommand,
    short_help="Put a run's manifest, metrics, and report into one file.",
    examples=(
        "ftkit runs bundle demo",
        "ftkit runs bundle demo -o demo.tar",
    ),
    help=f"""Write one file from which a run can be repeated and compared, on any cluster: manifest, resolved
    recipe, plan, job script, metrics, report, the image's lock, the data's manifest, and local changes to ftkit.
    Image, weights and data are not included. The same run gives the same bytes. Prints the file's path.

    {RUN_HELP}
    """,
)
@run_argument
@click.option("--output", "-o", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="File to write.")
@signing_options("the signature is a file next to the bundle.")
def command(reference: str, *, output: Path | None, signs: bool, key: Path | None) -> None:
    """Bundle a run."""
    from ftkit.runs.bundle import SIGNED_AS, write_bundle
    from ftkit.runs.signing import sign

    private_key = signing_key(signs=signs, key=key)
    terminal, layout = Terminal(), get_run(reference).layout
    path = output or Path(f"{layout.root.name}.tar")
    members = write_bundle(layout, path, _find_lock(layout))
    terminal.say(f"{', '.join(members)}")
    if layout.report.name not in members:
        terminal.warn(f"the bundle has no report; to write one first: ftkit report {layout.root.name}")
    terminal.data(f"{short_path(path.absolute())}\n")
    if private_key:
        signature = sign(path, private_key, SIGNED_AS)
        terminal.say(f"signed: {short_path(signature.absolute())}")


def _find_lock(layout: RunLayout) -> Path | None:
    """Return the lock of a run's image if its definition is on this machine and matches that image."""
    import hashlib

    from ftkit.config.context import Context
    from ftkit.config.image_reference import NamedImage, parse_image
    from ftkit.config.load import find_image
    from ftkit.errors import ConfigError, NotFoundError
    from ftkit.files import read_json_if_valid

    manifest = read_json_if_valid(layout.manifest, dict[str, Any]) or {}
    ctx = Context.here()
    try:
        image = parse_image(str(manifest["image"]), ctx.project) if manifest.get("image") else None
        lock = find_image(image.reference, ctx).lock_file if isinstance(image, NamedImage) else None
    except (ConfigError, NotFoundError):
        return None
    if lock is None or not lock.is_file():
        return None
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    return lock if manifest.get("image_lock_sha256", digest) == digest else None
