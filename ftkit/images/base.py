"""The base image of a build: select it by digest, pull it, and record its digest."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftkit import assets
from ftkit.config.image import base_lock_text, read_base_lock
from ftkit.config.image_reference import RegistryImage, parse_reference
from ftkit.errors import ConfigError, FtkitError, ImageError, NotFoundError, Problem
from ftkit.images import docker_engine
from ftkit.images.lock import write_lock_file
from ftkit.images.oci.access import find_credentials
from ftkit.images.oci.registry import Registry
from ftkit.images.progress import ProgressEvent, ignore_progress
from ftkit.images.transfer import pull

if TYPE_CHECKING:
    from pathlib import Path

    from docker import APIClient

    from ftkit.config.image_reference import Digest
    from ftkit.config.load import ImageDefinition
    from ftkit.images.docker_engine import DockerImage
    from ftkit.images.progress import Report


@dataclass(frozen=True)
class BaseRequest:
    """How a build selects its base.

    Args:
        name: a base to use instead of the definition's.
        repin: resolve the tag again, even if a digest is recorded.
        from_docker: use the docker engine's image of this name, without a digest from its registry.
    """

    name: str | None = None
    repin: bool = False
    from_docker: bool = False


@dataclass(frozen=True)
class SelectedBase:
    """The base to build on.

    Args:
        image: its reference; without a digest only with `BaseRequest.from_docker`.
        is_recorded: whether a lock records its digest.
        is_to_be_recorded: whether neither a lock nor the definition has its digest yet.
    """

    image: RegistryImage
    is_recorded: bool = False
    is_to_be_recorded: bool = False


def select_base(definition: ImageDefinition, request: BaseRequest, report: Report) -> SelectedBase:
    """Return the base with its digest: from the definition, from a lock, or of the tag in the registry.

    Raises:
        ConfigError: the definition sets the digest, so it can't be resolved again.
        NotFoundError: the registry has no such base.
        ImageError: the registry does not return its digest.
    """
    spec = definition.spec
    written = parse_reference(request.name or spec.base.reference)
    digest, is_recorded = written.digest, False
    if request.name is None:
        digest, is_recorded = spec.base.digest, definition.is_base_recorded
    elif digest is None:
        digest = _recorded(definition, written)
        is_recorded = digest is not None
    if request.repin and digest and not is_recorded:
        where, fix = ("--base", "Give it without a digest.") if request.name else (
            str(definition.base_file), "Change it there, or leave it out and let the build record it.",
        )  # fmt: skip
        raise ConfigError([Problem(where, "--repin", f"the base has a fixed digest: {digest}.", fix)])
    if digest and not request.repin:
        return SelectedBase(replace(written, digest=digest), is_recorded=is_recorded)
    if request.from_docker:
        return SelectedBase(written, is_to_be_recorded=True)
    report(ProgressEvent(f"resolving {written.tagged} at {written.host}"))
    return SelectedBase(replace(written, digest=_resolve(spec.reference, written, report)), is_to_be_recorded=True)


def current_digest_if_moved(base: SelectedBase) -> Digest | None:
    """Return the current digest of the base's tag in the registry; None if it is unchanged or can't be resolved."""
    tag = replace(base.image, digest=None)
    try:
        with Registry(tag, find_credentials(tag.host), ignore_progress, waits=()) as registry:
            current = registry.resolve()
    except FtkitError:
        return None
    return current if current != base.image.digest else None


def ensure_base(client: APIClient, wanted: RegistryImage, written: str, report: Report) -> DockerImage:
    """Return the base; pull it if the docker engine does not have it."""
    for name in (wanted.pinned, written):
        found = docker_engine.inspect(client, name)
        if found and (name == wanted.pinned or not wanted.digest):
            return found
    pull(client, wanted, report)
    found = docker_engine.inspect(client, wanted.pinned)
    if found is None:
        raise ImageError(f"docker pulled {wanted}, but does not have it", fix="check the engine's log")
    return found


def digest_of(image: DockerImage, wanted: RegistryImage) -> Digest | None:
    """Return the digest of the image in the repository that it was pulled from; None if the engine knows none."""
    for repository, digest in image.repo_digests:
        if parse_reference(repository).repository == wanted.repository:
            return digest
    return None


def record(definition: ImageDefinition, base: RegistryImage) -> Path:
    """Record the base's digest in the lock next to the definition, or in the user's own lock if that is read-only.

    Raises:
        ImageError: neither can be written.
    """
    if base.digest is None:
        raise AssertionError("a base without a digest can't be recorded")
    path = next((path for path in definition.base_locks if _may_write(path)), definition.base_locks[-1])
    for before in definition.base_locks[: definition.base_locks.index(path)]:
        if base.tagged in read_base_lock(before):
            raise ImageError(
                f"{before} records another digest of {base.tagged}, and you may not change it",
                fix="ask its owner to pin the base again, or define your own image with 'extends:'",
            )
    write_lock_file(path, base_lock_text({**read_base_lock(path), base.tagged: base.digest}))
    return path


def _recorded(definition: ImageDefinition, base: RegistryImage) -> Digest | None:
    found = (read_base_lock(path).get(base.tagged) for path in definition.base_locks)
    return next((digest for digest in found if digest), None)


def _may_write(path: Path) -> bool:
    """Tell whether a lock may be written: ftkit never changes the ones that it ships, even in a checkout."""
    return os.access(path.parent, os.W_OK) and not path.is_relative_to(assets.CONTAINERS)


def _resolve(reference: str, base: RegistryImage, report: Report) -> Digest:
    with Registry(base, find_credentials(base.host), report) as registry:
        try:
            return registry.resolve()
        except (ImageError, NotFoundError) as error:
            raise type(error)(
                f"{base.host} does not resolve {base.tagged}, the base of {reference}: {error.what}",
                meaning=error.meaning,
                fix=f"{error.fix}; or, if the docker engine here has the base: --allow-unpinned",
            ) from error
