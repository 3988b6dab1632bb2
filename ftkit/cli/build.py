"""`ftkit build`, `ftkit push` and `ftkit import`: build an image, push it to a registry, import it as one file."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import (
    complete_cluster,
    complete_image,
    image_argument,
    image_store,
    registry_of,
    registry_option,
    require_signature_option,
    required_registry,
    signing_key,
    signing_options,
)
from ftkit.cli.commands import ExamplesCommand, current_context
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.cli.terminal.format import duration, gib, short_path
from ftkit.config.context import Context
from ftkit.config.image_reference import parse_importable, parse_name
from ftkit.config.load import find_image, load_cluster
from ftkit.config.request import load_settings
from ftkit.images.build import BaseRequest, build
from ftkit.images.import_image import ImportRequest, import_image, select_source
from ftkit.images.inventory import is_unpinned
from ftkit.images.oci.credentials import from_user
from ftkit.images.signatures import sign_file
from ftkit.images.transfer import push, sign_pushed

if TYPE_CHECKING:
    from ftkit.config.image_reference import ImageFormat
    from ftkit.images.build import BuildResult
    from ftkit.images.import_image import ImportMethod, ImportResult
    from ftkit.images.oci.credentials import Credentials


@click.command(
    "build",
    cls=ExamplesCommand,
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
def build_command(  # noqa: PLR0913 - its options
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


@click.command(
    "push",
    cls=ExamplesCommand,
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
def push_command(
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

    started = time.monotonic()
    with ProgressView(terminal) as view:
        image = parse_name(reference)
        pushed = push(image, registry, given=given, report=view.report)
    terminal.say(Styled(f"pushed {pushed.reference} in {duration(time.monotonic() - started)}", "bold"))
    if private_key:
        sign_pushed(image, pushed, private_key, given)
        terminal.say(f"signed with {private_key}")
    terminal.data(f"{pushed.reference.repository}@{pushed.digest}\n")


@click.command(
    "import",
    cls=ExamplesCommand,
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
def import_command(  # noqa: PLR0913 - its options
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
    terminal, ctx, private_key = Terminal(), current_context(), signing_key(signs=signs, key=key)
    profile = load_cluster(cluster or load_settings(ctx).settings.cluster, ctx)
    image = parse_importable(wanted, Path.cwd())
    request = ImportRequest(
        image, registry_of(registry), profile, image_format or profile.image_format, on_node, method, public_key
    )
    imported = run_import(request, terminal, force=force)
    if private_key:
        terminal.say(f"signed: {short_path(sign_file(imported.file, private_key))}")
    terminal.data(f"{imported.link}\n")


def run_import(request: ImportRequest, terminal: Terminal, *, force: bool = False) -> ImportResult:
    """Import an image and report the result."""
    from ftkit.cli.terminal.progress_view import ProgressView

    started, store, name = time.monotonic(), image_store(), request.name.reference
    with ProgressView(terminal) as view:
        imported = import_image(name, select_source(request, view.report), store, force=force, report=view.report)
    where = short_path(imported.link)
    if request.public_key:
        terminal.say(f"signed, by {short_path(request.public_key)}")
    if imported.is_new:
        took = duration(time.monotonic() - started)
        terminal.say(Styled(f"imported {name} as {where} ({gib(imported.manifest.size / 2**30)}) in {took}", "bold"))
    else:
        terminal.say(f"{where} is already imported: the same image")
    return imported
