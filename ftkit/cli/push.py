"""`ftkit push`: push an image to a registry."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import image_argument, registry_option, required_registry, signing_key, signing_options
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.cli.terminal.format import duration

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.images.oci.access import Credentials


@click.command(
    "push",
    cls=ExamplesCommand,
    short_help="Push an image to a registry.",
    examples=(
        "ftkit push olmo3:25.02 --registry registry.example.com/team",
        'printf %s "$TOKEN" | ftkit push olmo3:25.02 --username me --password-stdin',
    ),
)
@image_argument
@registry_option
@click.option("--username", metavar="NAME", help="Registry user; '$oauthtoken' for NGC.")
@click.option("--password-stdin", is_flag=True, help="Read the password or token from standard input.")
@signing_options("the signature is stored next to the image in the registry.")
def command(
    reference: str,
    *,
    registry: str | None,
    username: str | None,
    password_stdin: bool,
    signs: bool,
    key: Path | None,
) -> None:
    """Push NAME:TAG, which 'ftkit build' made, to HOST/PATH/NAME:TAG.

    Uses the credentials of docker's configuration ('docker login', credential helpers).
    """
    from ftkit.config.image_reference import parse_name
    from ftkit.images.oci.access import from_user

    private_key = signing_key(signs=signs, key=key)
    target = required_registry(registry, reference)
    given = None
    if password_stdin:
        host = parse_name(reference).in_registry(target).host
        given = from_user(host, username, sys.stdin.read().strip("\r\n"))
    elif username:
        raise click.UsageError("--username requires --password-stdin", click.get_current_context())
    push_and_report(reference, target, given, Terminal(), private_key)


def push_and_report(
    reference: str,
    registry: str,
    given: Credentials | None,
    terminal: Terminal,
    private_key: Path | None = None,
) -> None:
    """Push an image, sign it if a private key is given, and print its address with its digest."""
    from ftkit.cli.terminal.progress_view import ProgressView
    from ftkit.config.image_reference import parse_name
    from ftkit.images.transfer import push, sign_pushed

    started = time.monotonic()
    with ProgressView(terminal) as view:
        image = parse_name(reference)
        pushed = push(image, registry, given=given, report=view.report)
    terminal.say(Styled(f"pushed {pushed.reference} in {duration(time.monotonic() - started)}", "bold"))
    if private_key:
        sign_pushed(image, pushed, private_key, given)
        terminal.say(f"signed with {private_key}")
    terminal.data(f"{pushed.reference.repository}@{pushed.digest}\n")
