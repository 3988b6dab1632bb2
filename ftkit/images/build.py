"""Build an image from its definition."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.errors import ImageError
from ftkit.images import credentials, engine, labels
from ftkit.images.context import assemble
from ftkit.images.engine import EngineImage
from ftkit.images.progress import Progress, Report, say_nothing
from ftkit.images.retries import with_retries
from ftkit.images.self_check import PASSED
from ftkit.images.store import write_whole
from ftkit.images.streams import BuildFollower, explain_transfer, follow_transfer
from ftkit.specs.image_reference import check_name, local_name, parse_reference

if TYPE_CHECKING:
    from docker import APIClient

    from ftkit.images.context import BuildContext
    from ftkit.specs.image_reference import RegistryImage
    from ftkit.specs.load import ImageDefinition

SELF_CHECK = ("python3", "-m", "ftkit.images.self_check")


@dataclass(frozen=True)
class Built:
    """What a build came to.

    Args:
        name: what the engine calls the image.
        image: the image.
        is_new: whether anything was built.
        recorded: the file that the base's digest was written into; none: it was not.
        digest_to_record: the base's digest, when it could not be written down.
    """

    name: str
    image: EngineImage
    is_new: bool
    recorded: Path | None = None
    digest_to_record: str = ""


def build(
    definition: ImageDefinition,
    *,
    base: str | None = None,
    no_cache: bool = False,
    allow_unpinned: bool = False,
    report: Report = say_nothing,
) -> Built:
    """Build an image, unless nothing changed since it was built.

    Raises:
        ConfigError: the name can't be that of an image.
        ImageError: the base is unpinned, the lock is stale, a step failed, or the image fails its self-check.
        NotFoundError: there is no such base.
        PrerequisiteError: no docker engine answers.
    """
    spec = definition.spec
    check_name(spec.reference)
    wanted = parse_reference(base or spec.base.reference)
    if base is None and spec.base.digest:
        wanted = parse_reference(f"{spec.base.reference.partition('@')[0]}@{spec.base.digest}")
    if not wanted.digest and not allow_unpinned:
        raise _unpinned(definition, wanted, is_from_definition=base is None)
    context = assemble(definition)
    with engine.connected() as client:
        found = _base(client, wanted, base or spec.base.reference, report)
        digest = wanted.digest or _digest_of(found, wanted) or ""
        key, name = context.digest(f"{found.id} {wanted.digest}"), local_name(spec.reference)
        image = engine.inspect(client, name)
        is_new = no_cache or image is None or image.labels.get(labels.BUILD_KEY) != key
        if image is None or is_new:
            facts = labels.BaseFacts(str(wanted), digest, found.id, is_pinned=bool(wanted.digest))
            made = labels.make_labels(
                spec, facts, lock_sha256=context.lock_sha256, build_key=key, commit=labels.own_commit()
            )
            image = _run_build(client, context, found.id, made, no_cache=no_cache, report=report)
    recorded = _record(definition, digest) if digest and base is None and not spec.base.digest else None
    unrecorded = digest if digest and not recorded and not wanted.digest and base is None else ""
    return Built(name, image, is_new=is_new, recorded=recorded, digest_to_record=unrecorded)


def _unpinned(definition: ImageDefinition, wanted: RegistryImage, *, is_from_definition: bool) -> ImageError:
    where = f"'digest:' below 'base:' in {definition.base_file}" if is_from_definition else "--base NAME@sha256:…"
    return ImageError(
        f"the base {wanted} of {definition.spec.reference} is unpinned: no digest says which image it is",
        meaning="whoever owns the tag can put another image there, and two builds need not be the same",
        fix=f"give its digest with {where}; or build with --allow-unpinned, which records the digest",
    )


def _base(client: APIClient, wanted: RegistryImage, written: str, report: Report) -> EngineImage:
    """Return the base, pulled if the engine does not have it."""
    for name in (wanted.pinned, written):
        found = engine.inspect(client, name)
        if found and (name == wanted.pinned or not wanted.digest):
            return found
    known = credentials.find(wanted.host)
    stage = f"pulling {wanted}"

    def attempt() -> None:
        import docker  # noqa: PLC0415

        try:
            events = client.pull(wanted.repository, tag=wanted.digest or wanted.tag, stream=True, decode=True)
            follow_transfer(events, stage, report, wanted, known)
        except docker.errors.APIError as error:
            raise explain_transfer(str(error.explanation or error), wanted, known) from error

    with_retries(attempt, report, stage)
    found = engine.inspect(client, wanted.pinned)
    if found is None:
        raise ImageError(f"docker pulled {wanted}, and does not have it", fix="see the engine's log")
    return found


def _digest_of(image: EngineImage, wanted: RegistryImage) -> str:
    """Return the digest that the image has in the registry that it came from."""
    for repository, digest in image.repo_digests:
        if parse_reference(repository).repository == wanted.repository:
            return digest
    return ""


def _run_build(
    client: APIClient,
    context: BuildContext,
    base_id: str,
    made_labels: dict[str, str],
    *,
    no_cache: bool,
    report: Report,
) -> EngineImage:
    """Build, check, and only then give the image its name."""
    import docker  # noqa: PLC0415

    arguments = {**context.arguments, "BASE_IMAGE": base_id}
    try:
        events = client.build(
            fileobj=context.archive(made_labels),
            custom_context=True,
            buildargs=arguments,
            nocache=no_cache,
            rm=True,
            forcerm=True,
            network_mode="host",  # the steps see the package index as this machine does
            decode=True,
        )
        image_id = BuildFollower(report).follow(events)
    except docker.errors.APIError as error:
        raise engine.as_image_error(error, "docker refused to build") from error
    report(Progress("checking the image from inside"))
    check_inside(client, image_id, made_labels[labels.REFERENCE])
    repository, _, tag = local_name(made_labels[labels.REFERENCE]).rpartition(":")
    client.tag(image_id, repository, tag)
    return engine.inspect_required(client, image_id, "build it again")


def check_inside(client: APIClient, image: str, reference: str) -> None:
    """Run the self-check in an image.

    Raises:
        ImageError: with everything that is wrong.
    """
    code, said = engine.run_inside(client, image, list(SELF_CHECK))
    said = said.strip() or f"the self-check ended with {code} and said nothing"
    if code != 0 or PASSED not in said:
        lines = "\n".join(f"    {line}" for line in said.splitlines()[-20:])
        raise ImageError(
            f"{reference} is not as its definition says:\n{lines}",
            meaning="a package was replaced, is missing, or does not work with the base",
            fix="change its packages and lock it again; the image was not given its name",
        )


def _record(definition: ImageDefinition, digest: str) -> Path | None:
    """Write the base's digest below its reference; None if that file is not the user's to change."""
    path = definition.base_file
    text = path.read_text(encoding="utf-8")
    line = re.search(
        rf"^( +)reference: *['\"]?{re.escape(definition.spec.base.reference)}['\"]? *$", text, re.MULTILINE
    )
    if not line or not os.access(path, os.W_OK) or "_assets" in path.parts:
        return None
    write_whole(path, (text[: line.end()] + f"\n{line[1]}digest: {digest}" + text[line.end() :]).encode())
    return path
