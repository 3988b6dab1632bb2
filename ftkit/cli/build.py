"""`ftkit build`: from an image's definition to an image in the docker engine."""

from __future__ import annotations

import time

import click

from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.image_arguments import image_argument, registry_option, required_registry
from ftkit.cli.push import push_and_report
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.cli.terminal.format import duration, gib, short_path
from ftkit.cli.terminal.progress_view import ProgressView
from ftkit.config.context import Context
from ftkit.config.load import find_image
from ftkit.images.base import BaseRequest
from ftkit.images.build import BuildResult, build
from ftkit.images.status import is_unpinned


@click.command(
    "build",
    cls=ExamplesCommand,
    short_help="Build a training image.",
    examples=(
        "ftkit build olmo3:25.02",
        "ftkit build olmo3:25.02 --push --registry registry.example.com/team",
        "ftkit build olmo3:25.02 --base registry.example.com/mirror/pytorch:25.02-py3",
    ),
)
@image_argument
@click.option("--base", metavar="REF", help="Build on another base than the definition's.")
@click.option("--repin", is_flag=True, help="Take what the base's tag is by now, and record its digest anew.")
@click.option("--no-cache", is_flag=True, help="Run every step anew.")
@click.option("--allow-unpinned", is_flag=True, help="Take what the docker engine has as the base; ask no registry.")
@click.option("--push", "does_push", is_flag=True, help="Push the image afterwards.")
@registry_option
def command(  # noqa: PLR0913 - its options
    reference: str,
    *,
    base: str | None,
    repin: bool,
    no_cache: bool,
    allow_unpinned: bool,
    does_push: bool,
    registry: str | None,
) -> None:
    """Build NAME:TAG as its folder in containers/ defines it, and check it from inside.

    Builds nothing if nothing changed: Dockerfile, lock, ftkit, base. A base without a digest gets the one that its tag
    has at the registry, which bases.lock records: later builds take the same base.
    """
    terminal = Terminal()
    target = required_registry(registry, reference) if does_push else None
    definition = find_image(reference, Context.here())
    started = time.monotonic()
    with ProgressView(terminal) as view:
        request = BaseRequest(base, repin=repin, from_docker=allow_unpinned)
        built = build(definition, request, no_cache=no_cache, report=view.report)
    _say(built, reference, time.monotonic() - started, terminal)
    if target:
        push_and_report(reference, target, None, terminal)
    else:
        terminal.data(f"{built.image.id}\n")


def _say(built: BuildResult, reference: str, seconds: float, terminal: Terminal) -> None:
    size = gib(built.image.size / 2**30) + (", on an unpinned base" if is_unpinned(built.image) else "")
    if built.is_new:
        terminal.say(Styled(f"built {built.name} ({size}) in {duration(seconds)}", "bold"))
    else:
        terminal.say(f"{built.name} ({size}) is up to date: nothing changed since it was built")
    if built.recorded:
        terminal.say(f"built on {built.base}: recorded in {short_path(built.recorded)}, which later builds go by")
    elif built.base.digest is None:
        terminal.warn(
            f"nothing says which image {built.base} is: the docker engine has it, and knows no digest of it; push it "
            "to a registry, and name that as the base"
        )
    if built.moved_to:
        terminal.warn(
            f"{built.base.tagged} is another image by now ({built.moved_to}), and this build took the recorded one "
            f"({built.base.digest}); for the new one: ftkit build {reference} --repin"
        )
