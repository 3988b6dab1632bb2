"""`ftkit push`: from the docker engine to a registry."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.image_arguments import image_argument, registry_option, required_registry
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.cli.terminal.format import duration
from ftkit.cli.terminal.progress_view import ProgressView
from ftkit.images.oci import credentials
from ftkit.images.push import push, remote_reference

if TYPE_CHECKING:
    from ftkit.images.oci.credentials import Credentials


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
@click.option("--username", metavar="NAME", help="User of the registry; '$oauthtoken' if it is NGC's.")
@click.option("--password-stdin", is_flag=True, help="Read the password or token from standard input.")
def command(reference: str, *, registry: str | None, username: str | None, password_stdin: bool) -> None:
    """Push NAME:TAG, which 'ftkit build' made, to HOST/PATH/NAME:TAG.

    Credentials come from docker's own configuration ('docker login', credential helpers).
    """
    target = required_registry(registry, reference)
    given = None
    if password_stdin:
        host = remote_reference(reference, target).host
        given = credentials.from_user(host, username, sys.stdin.read().strip("\r\n"))
    elif username:
        raise click.UsageError("--username goes with --password-stdin", click.get_current_context())
    push_and_report(reference, target, given, Terminal())


def push_and_report(reference: str, registry: str, given: Credentials | None, terminal: Terminal) -> None:
    """Push, and print where the image is now, by digest."""
    started = time.monotonic()
    with ProgressView(terminal) as view:
        pushed = push(reference, registry, given=given, report=view.report)
    terminal.say(Styled(f"pushed {pushed.reference} in {duration(time.monotonic() - started)}", "bold"))
    terminal.data(f"{pushed.reference.repository}@{pushed.digest}\n")
