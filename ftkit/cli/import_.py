"""`ftkit import`: import an image as one file on the shared file system."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import (
    complete_cluster,
    complete_image,
    image_store,
    registry_of,
    registry_option,
    require_signature_option,
    signing_key,
    signing_options,
)
from ftkit.cli.commands import ExamplesCommand, current_context
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.cli.terminal.format import duration, gib, short_path

if TYPE_CHECKING:
    from ftkit.config.image_reference import ImageFormat
    from ftkit.images.import_image import ImportMethod, ImportRequest, ImportResult


@click.command(
    "import",
    cls=ExamplesCommand,
    short_help="Import an image as one file for a cluster.",
    examples=(
        "ftkit import olmo3:25.02",
        "ftkit import olmo3:25.02 --cluster mycluster --on-node",
        "ftkit import docker://registry.example.com#team/olmo3:25.02",
    ),
)
@click.argument("wanted", metavar="NAME:TAG|URI", shell_complete=complete_image)
@click.option(
    "--cluster", metavar="NAME", shell_complete=complete_cluster, help="Cluster to import for. [env var: FTKIT_CLUSTER]"
)
@click.option(
    "--format",
    "image_format",
    type=click.Choice(["sqsh", "sif"]),
    help="squashfs for enroot and pyxis, SIF for Apptainer; default: what the cluster uses.",
)
@click.option("--on-node", is_flag=True, help="Run enroot on a compute node, on its local disk.")
@click.option("--with", "method", type=click.Choice(["auto", "enroot", "ftkit"]), default="auto",
              help="Program that writes the squashfs file; auto: ftkit, or enroot where ftkit can't.")  # fmt: skip
@click.option("--force", is_flag=True, help="Import again even if the image is already imported.")
@registry_option
@require_signature_option("an image")
@signing_options("the signature is a file next to the imported one.")
def command(  # noqa: PLR0913 - its options
    wanted: str,
    *,
    cluster: str | None,
    image_format: ImageFormat | None,
    on_node: bool,
    method: ImportMethod,
    force: bool,
    registry: str | None,
    public_key: Path | None,
    signs: bool,
    key: Path | None,
) -> None:
    """Import an image into the workspace's images/, named by digest, with a readable link and a manifest.

    NAME:TAG comes from the docker engine if it was built here, else from the registry; with --require-signature always
    from the registry, which has the signatures. An image that is already imported is not imported again.
    """
    from ftkit.config.image_reference import parse_importable
    from ftkit.config.load import load_cluster
    from ftkit.config.request import load_settings
    from ftkit.images.import_image import ImportRequest

    terminal, ctx, private_key = Terminal(), current_context(), signing_key(signs=signs, key=key)
    profile = load_cluster(cluster or load_settings(ctx).settings.cluster, ctx)
    image = parse_importable(wanted, Path.cwd())
    request = ImportRequest(
        image, registry=registry_of(registry), cluster=profile, on_node=on_node, method=method, public_key=public_key
    )
    chosen = image_format or profile.image_format
    imported = run_import(request, chosen, terminal, force=force)
    if private_key:
        from ftkit.images.signatures import sign_file

        terminal.say(f"signed: {short_path(sign_file(imported.file, private_key))}")
    terminal.data(f"{imported.link}\n")


def run_import(
    request: ImportRequest, image_format: ImageFormat, terminal: Terminal, *, force: bool = False
) -> ImportResult:
    """Import an image and report the result."""
    from ftkit.cli.terminal.progress_view import ProgressView
    from ftkit.images.import_image import import_image, select_source
    from ftkit.images.sif import SifSource

    started, store, name = time.monotonic(), image_store(), request.name.reference
    with ProgressView(terminal) as view:
        source = SifSource(request, view.report) if image_format == "sif" else select_source(request, view.report)
        imported = import_image(name, source, store, force=force, report=view.report)
    where = short_path(imported.link)
    if request.public_key:
        terminal.say(f"signed, by {short_path(request.public_key)}")
    if imported.is_new:
        took = duration(time.monotonic() - started)
        terminal.say(Styled(f"imported {name} as {where} ({gib(imported.manifest.size / 2**30)}) in {took}", "bold"))
    else:
        terminal.say(f"{where} is already imported: the same image")
    return imported
