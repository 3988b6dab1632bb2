"""`ftkit verify`: whether an imported image is still what was imported."""

from __future__ import annotations

from pathlib import Path

import click

from ftkit.cli.completing import complete_image
from ftkit.cli.image_arguments import image_store
from ftkit.cli.lazy_group import ExamplesCommand
from ftkit.cli.progress_view import ProgressView
from ftkit.cli.terminal import Styled, Terminal
from ftkit.cli.wording import gib
from ftkit.images.deep_check import check_deep
from ftkit.images.references import check_name
from ftkit.images.verify import require_same, verify


@click.command(
    "verify",
    cls=ExamplesCommand,
    short_help="Check an imported image against its manifest.",
    examples=("ftkit verify olmo3:25.02", "ftkit verify /shared/images/olmo3+25.02.sqsh --deep"),
)
@click.argument("wanted", metavar="NAME:TAG|FILE", shell_complete=complete_image)
@click.option("--deep", is_flag=True, help="Run the self-check inside as well.")
def command(wanted: str, *, deep: bool) -> None:
    """Recompute the digests of an imported image; name every difference and end with code 10 if there is one."""
    terminal = Terminal()
    file = _file(wanted)
    with ProgressView(terminal) as view:
        verdict = verify(file, view.report, name="NAME:TAG" if _is_path(wanted) else wanted)
        require_same(verdict)
        if deep:
            check_deep(file, verdict.manifest, view.report)
    manifest = verdict.manifest
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
    terminal.say(Styled("it is what was imported", "green"))


def _is_path(wanted: str) -> bool:
    return "/" in wanted or wanted.endswith((".sqsh", ".sif"))


def _file(wanted: str) -> Path:
    if _is_path(wanted):
        return Path(wanted).expanduser().absolute()
    check_name(wanted)
    store = image_store()
    sif = store.link(wanted, "sif")
    return sif if sif.exists() and not store.link(wanted, "sqsh").exists() else store.link(wanted, "sqsh")
