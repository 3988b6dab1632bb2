"""`ftkit images`, `build`, `push` and `import`: list, pin, build and push images, and import them as one file."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftkit.cli import arguments
from ftkit.cli.commands import command, current_context
from ftkit.cli.image_check import run_import
from ftkit.cli.terminal.console import Cell, Styled, Terminal
from ftkit.cli.terminal.format import age, duration, gib, short_path
from ftkit.cli.terminal.progress_view import ProgressView
from ftkit.config.context import Context, list_images
from ftkit.config.image_reference import ImageFormat, parse_importable, parse_name
from ftkit.config.load import find_image, load_cluster, load_image
from ftkit.config.request import load_settings
from ftkit.errors import plural
from ftkit.images.build import BaseRequest, build
from ftkit.images.build_context import definition_file, write_files, write_lock
from ftkit.images.image_store import ImageStatus, image_statuses, is_unpinned, undefined_statuses
from ftkit.images.import_image import ImportMethod, ImportRequest
from ftkit.images.oci.connection import Credentials, from_user
from ftkit.images.signatures import sign_file
from ftkit.images.transfer import push, sign_pushed

if TYPE_CHECKING:
    from ftkit.config.image import ImageSpec
    from ftkit.images.image_store import ImageStore


@command("list", "ftkit images", "ftkit images --json")
@arguments.json_option
def list_command(*, as_json: bool) -> None:
    """List images: the base, whether it is built, pushed and imported, its age and its size."""
    terminal, ctx, store = Terminal(), Context.here(), arguments.image_store()
    images = arguments.load_all(list_images(ctx), lambda reference: load_image(reference, ctx), terminal)
    specs = dict(images)
    states, has_docker = image_statuses(list(specs), store)
    both = [(specs.get(state.reference), state) for state in (*states, *undefined_statuses(specs, store))]
    if as_json:
        terminal.json([_as_json(spec, state, store) for spec, state in both])
        return
    show(both, terminal)
    if not has_docker:
        terminal.say("no docker engine answers here: BUILT and PUSHED are unknown")


def show(images: Sequence[tuple[ImageSpec | None, ImageStatus]], terminal: Terminal) -> None:
    """Print the table; without descriptions on a narrow terminal."""
    titles = ("IMAGE", "BASE", "BUILT", "PUSHED…", "IMPORTED", "DESCRIPTION…")[: 6 if terminal.is_roomy else 5]
    terminal.table(titles, [_cells(spec, state)[: len(titles)] for spec, state in images])


def _cells(spec: ImageSpec | None, state: ImageStatus) -> list[Cell]:
    built, made = state.built, "-"
    base: Cell = "-"
    if spec:
        base = "pinned" if spec.base.digest else Styled("unpinned", "yellow")
    if built:
        made = f"{gib(built.size / 2**30)}, {age(time.time() - built.config.created)} ago"
        if spec and spec.base.digest and is_unpinned(built):
            base = Styled("built unpinned", "yellow")
    imported, damaged = [], False
    for file in state.imported:
        kind = file.link.suffix.removeprefix(".")
        if file.manifest is None:
            damaged = True
            imported.append(f"{kind} damaged, or not made by ftkit")
            continue
        is_current = built is None or file.manifest.image_id == built.id
        when = f"{age(time.time() - file.manifest.imported)} ago" if is_current else "older build"
        imported.append(f"{kind} {gib(file.size / 2**30)}, {when}")
    files: Cell = ", ".join(imported) or "-"
    if damaged or not state.is_current:
        files = Styled(", ".join(imported), "red" if damaged else "yellow")
    return [
        state.reference,
        base,
        made,
        ", ".join(sorted({digest.partition("/")[0] for digest in state.pushed})) or "-",
        files,
        spec.description if spec else ", ".join(sorted(state.sources)) or "-",
    ]


def _as_json(spec: ImageSpec | None, state: ImageStatus, store: ImageStore) -> dict[str, object]:
    built = state.built
    return {
        "reference": state.reference,
        "file": str(store.link(state.reference, "sqsh")),
        "is_imported": any(file.manifest for file in state.imported),
        "is_pinned": spec and spec.base.digest is not None,
        "built": built
        and {"id": built.id, "size": built.size, "created": built.config.created, "labels": built.config.labels},
        "pushed": list(state.pushed),
        "imported": [
            {
                "file": str(file.link),
                "size": file.size,
                "is_whole": file.manifest is not None,
                **{key: getattr(file.manifest, key, None) for key in ("image_id", "sha256", "imported", "source")},
            }
            for file in state.imported
        ],
        **(spec.model_dump(mode="json") if spec else {}),
    }


@command("definition", "ftkit images definition olmo3:25.02 --files olmo3-files > olmo3.def")
@arguments.image_argument
@arguments.folder_option(
    "--files", about="Also write the files that the definition copies to this folder.", exists=False
)
def definition_command(reference: str, *, files: Path | None) -> None:
    """Print a definition file that builds NAME:TAG with Apptainer or Singularity, without docker."""
    terminal, definition = Terminal(), find_image(reference, Context.here())
    text = definition_file(definition, files)
    if files:
        write_files(definition, files)
        terminal.say(f"wrote the files that the definition copies to {short_path(files.absolute())}")
    terminal.data(text)


@command("lock", "ftkit images lock olmo3:25.02")
@arguments.image_argument
def lock_command(reference: str) -> None:
    """Resolve the packages of NAME:TAG and write its lock, with hashes.

    Packages of the base (torch, triton, numpy) are never in the lock. Images that extend one file share its lock.
    """
    definition = find_image(reference, Context.here())
    pinned = write_lock(definition)
    where = short_path(definition.lock_file)
    Terminal().say(Styled(f"wrote {where}: {plural(len(pinned), 'package')}, each with hashes", "bold"))


@command(
    "build",
    "ftkit build olmo3:25.02",
    "ftkit build olmo3:25.02 --push --registry registry.example.com/team",
    "ftkit build olmo3:25.02 --base registry.example.com/mirror/pytorch:25.02-py3",
)
@arguments.image_argument
@click.option("--base", metavar="REF", help="Base image that replaces the definition's.")
@click.option("--repin", is_flag=True, help="Resolve the base's tag again and record its digest.")
@click.option("--no-cache", is_flag=True, help="Run every step again.")
@click.option(
    "--allow-unpinned", is_flag=True, help="Use the base that the docker engine has, without asking a registry."
)
@click.option("--push", "pushes", is_flag=True, help="Push the image after the build.")
@arguments.registry_option
def build_command(  # noqa: PLR0913 - its options
    reference: str, *, base: str | None, repin: bool, no_cache: bool, allow_unpinned: bool, pushes: bool,
    registry: str | None,
) -> None:  # fmt: skip
    """Build NAME:TAG from its folder in containers/, and run its self-check.

    Skips the build if Dockerfile, lock, ftkit and base have not changed. For a base without a digest, ftkit resolves
    its tag at the registry and records the digest in bases.lock, so that later builds use the same base.
    """
    terminal = Terminal()
    target = arguments.required_registry(registry, reference) if pushes else None
    definition = find_image(reference, Context.here())
    started = time.monotonic()
    with ProgressView(terminal) as view:
        request = BaseRequest(base, repin=repin, from_docker=allow_unpinned)
        built = build(definition, request, no_cache=no_cache, report=view.report)
    size = gib(built.image.size / 2**30) + (", on an unpinned base" if is_unpinned(built.image) else "")
    if built.is_new:
        terminal.say(Styled(f"built {built.name} ({size}) in {duration(time.monotonic() - started)}", "bold"))
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
    if target:
        push_and_report(reference, target, None, terminal)
    else:
        terminal.data(f"{built.image.id}\n")


@command(
    "push",
    "ftkit push olmo3:25.02 --registry registry.example.com/team",
    'printf %s "$TOKEN" | ftkit push olmo3:25.02 --username me --password-stdin',
)
@arguments.image_argument
@arguments.registry_option
@click.option("--username", metavar="NAME", help="Registry user; '$oauthtoken' for NGC.")
@click.option("--password-stdin", is_flag=True, help="Read the password or token from standard input.")
@arguments.signing_options("the signature is stored next to the image in the registry.")
def push_command(
    reference: str, *, registry: str | None, username: str | None, password_stdin: bool, signs: bool, key: Path | None
) -> None:
    """Push NAME:TAG, which 'ftkit build' made, to HOST/PATH/NAME:TAG.

    Uses the credentials of docker's configuration ('docker login', credential helpers).
    """
    private_key = arguments.signing_key(signs=signs, key=key)
    target = arguments.required_registry(registry, reference)
    given = None
    if password_stdin:
        given = from_user(parse_name(reference).in_registry(target).host, username, sys.stdin.read().strip("\r\n"))
    elif username:
        raise arguments.usage_error("--username requires --password-stdin")
    push_and_report(reference, target, given, Terminal(), private_key)


def push_and_report(
    reference: str, registry: str, given: Credentials | None, terminal: Terminal, private_key: Path | None = None
) -> None:
    started = time.monotonic()
    with ProgressView(terminal) as view:
        image = parse_name(reference)
        pushed, digest = push(image, registry, given=given, report=view.report)
    terminal.say(Styled(f"pushed {pushed} in {duration(time.monotonic() - started)}", "bold"))
    if private_key:
        sign_pushed(image, pushed, digest, private_key, given)
        terminal.say(f"signed with {private_key}")
    terminal.data(f"{pushed.repository}@{digest}\n")


@command(
    "import",
    "ftkit import olmo3:25.02",
    "ftkit import olmo3:25.02 --cluster mycluster --on-node",
    "ftkit import docker://registry.example.com#team/olmo3:25.02",
)
@click.argument("wanted", metavar="NAME:TAG|URI", shell_complete=arguments.complete_image)
@arguments.cluster_option
@click.option(
    "--format", "image_format", type=click.Choice(["sqsh", "sif"]),
    help="squashfs for enroot and pyxis, SIF for Apptainer; default: what the cluster uses.",
)  # fmt: skip
@click.option("--on-node", is_flag=True, help="Run enroot on a compute node, on its local disk.")
@click.option("--with", "method", type=click.Choice(["auto", "enroot", "ftkit"]), default="auto",
              help="Program that writes the squashfs file; auto: ftkit, or enroot where ftkit can't.")  # fmt: skip
@click.option("--force", is_flag=True, help="Import again even if the image is already imported.")
@arguments.registry_option
@arguments.require_signature_option("an image")
@arguments.signing_options("the signature is a file next to the imported one.")
def import_command(  # noqa: PLR0913 - its options
    wanted: str, *, cluster: str | None, image_format: ImageFormat | None, on_node: bool, method: ImportMethod,
    force: bool, registry: str | None, public_key: Path | None, signs: bool, key: Path | None,
) -> None:  # fmt: skip
    """Import an image into the workspace's images/, named by digest, with a readable link and a manifest.

    NAME:TAG comes from the docker engine if it was built here, else from the registry; with --require-signature always
    from the registry, which has the signatures. An image that is already imported is not imported again.
    """
    terminal, ctx, private_key = Terminal(), current_context(), arguments.signing_key(signs=signs, key=key)
    profile = load_cluster(cluster or load_settings(ctx).settings.cluster, ctx)
    image = parse_importable(wanted, Path.cwd())
    request = ImportRequest(
        image,
        arguments.registry_of(registry),
        profile,
        image_format or profile.image_format,
        on_node,
        method,
        public_key,
    )
    imported = run_import(request, terminal, force=force)
    if private_key:
        terminal.say(f"signed: {short_path(sign_file(imported.file, private_key))}")
    terminal.data(f"{imported.link}\n")
