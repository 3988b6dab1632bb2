"""Build an image from its definition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.config.digest import Digest
from ftkit.config.image_reference import RegistryImage, check_name, local_name
from ftkit.errors import ImageError
from ftkit.images import engine, labels
from ftkit.images.base import BaseWish, choose_base, current_digest_if_moved, digest_of, have_base, record
from ftkit.images.context import assemble
from ftkit.images.engine import EngineImage
from ftkit.images.oci.streams import BuildFollower
from ftkit.images.progress import Progress, Report, say_nothing
from ftkit.images.self_check import PASSED

if TYPE_CHECKING:
    from docker import APIClient

    from ftkit.config.load import ImageDefinition
    from ftkit.images.context import BuildContext

SELF_CHECK = ("python3", "-m", "ftkit.images.self_check")


@dataclass(frozen=True)
class Built:
    """What a build came to.

    Args:
        name: what the engine calls the image.
        image: the image.
        base: what it was built on, with the digest if that is known.
        is_new: whether anything was built.
        recorded: the lock that the base's digest was written into; none: it was there already, or there is none.
        moved_to: the digest that the base's tag has in its registry by now, if it is another than the recorded one.
    """

    name: str
    image: EngineImage
    base: RegistryImage
    is_new: bool
    recorded: Path | None = None
    moved_to: Digest | None = None


def build(
    definition: ImageDefinition,
    wish: BaseWish,
    *,
    no_cache: bool = False,
    report: Report = say_nothing,
) -> Built:
    """Build an image, unless nothing changed since it was built.

    Raises:
        ConfigError: the name can't be that of an image, or the base can't be pinned anew.
        ImageError: the registry does not tell the base's digest, the lock is stale, a step failed, or the image fails
            its self-check.
        NotFoundError: there is no such base.
        PrerequisiteError: no docker engine answers.
    """
    spec = definition.spec
    check_name(spec.reference)
    context = assemble(definition)
    moved_to = None
    with engine.connected() as client:
        base = choose_base(definition, wish, report)
        found = have_base(client, base.image, wish.name or spec.base.reference, report)
        pinned = base.image if base.image.digest else replace(base.image, digest=digest_of(found, base.image))
        key, name = context.digest(f"{found.id} {base.image.digest or ''}"), local_name(spec.reference)
        image = engine.inspect(client, name)
        is_new = no_cache or image is None or image.labels.get(labels.BUILD_KEY) != key
        if image is None or is_new:
            moved_to = current_digest_if_moved(base) if base.is_recorded else None
            facts = labels.BaseFacts(str(base.image), pinned.digest, found.id, is_pinned=base.image.digest is not None)
            made = labels.make_labels(
                spec, facts, lock_sha256=context.lock_sha256, build_key=key, commit=labels.own_commit()
            )
            image = _run_build(client, context, found.id, made, no_cache=no_cache, report=report)
    recorded = record(definition, pinned) if base.is_to_be_recorded and pinned.digest else None
    return Built(name, image, pinned, is_new=is_new, recorded=recorded, moved_to=moved_to)


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
