"""`ftkit build`: build an image from its definition with the docker engine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import image_argument, registry_option, required_registry
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.push import push_and_report
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.cli.terminal.format import duration, gib, short_path
from ftkit.config.context import Context

if TYPE_CHECKING:
    from ftkit.images.build import BuildResult


@click.command(
    "build",
    cls=ExamplesCommand,
    short_help="Build an image.",
    examples=(
        "ftkit build olmo3:25.02",
        "ftkit build olmo3:25.02 --push --registry registry.example.com/team",
        "ftkit build olmo3:25.02 --base registry.example.com/mirror/pytorch:25.02-py3",
    ),
)
@image_argument
@click.option("--base", metavar="REF", help="Base image that replaces the definition's.")
@click.option("--repin", is_flag=True, help="Resolve the base's tag again and record its digest.")
@click.option("--no-cache", is_flag=True, help="Run every step again.")
@click.option(
    "--allow-unpinned", is_flag=True, help="Use the base that the docker engine has, without asking a registry."
)
@click.option("--push", "does_push", is_flag=True, help="Push the image after the build.")
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
    """Build NAME:TAG from its folder in containers/, and run its self-check.

    Skips the build if Dockerfile, lock, ftkit and base have not changed. For a base without a digest, ftkit resolves
    its tag at the registry and records the digest in bases.lock, so that later builds use the same base.
    """
    from ftkit.cli.terminal.progress_view import ProgressView
    from ftkit.config.load import find_image
    from ftkit.images.base import BaseRequest
    from ftkit.images.build import build

    terminal = Terminal()
    target = required_registry(registry, reference) if does_push else None
    definition = find_image(reference, Context.here())
    started = time.monotonic()
    with ProgressView(terminal) as view:
        request = BaseRequest(base, repin=repin, from_docker=allow_unpinned)
        built = build(definition, request, no_cache=no_cache, report=view.report)
    _print_result(built, reference, time.monotonic() - started, terminal)
    if target:
        push_and_report(reference, target, None, terminal)
    else:
        terminal.data(f"{built.image.id}\n")


def _print_result(built: BuildResult, reference: str, seconds: float, terminal: Terminal) -> None:
    from ftkit.images.status import is_unpinned

    size = gib(built.image.size / 2**30) + (", on an unpinned base" if is_unpinned(built.image) else "")
    if built.is_new:
        terminal.say(Styled(f"built {built.name} ({size}) in {duration(seconds)}", "bold"))
    else:
        terminal.say(f"{built.name} ({size}) is up to date: inputs are unchanged since the last build")
    if built.recorded:
        terminal.say(f"base {built.base}: recorded in {short_path(built.recorded)} for later builds")
    elif built.base.digest is None:
        terminal.warn(
            f"the base {built.base} is not pinned: the docker engine has no digest for it; push it to a "
            "registry, and use its address there as the base"
        )
    if built.moved_to:
        terminal.warn(
            f"the tag {built.base.tagged} now refers to another image ({built.moved_to}); this build used the recorded "
            f"one ({built.base.digest}); to use the new one: ftkit build {reference} --repin"
        )
