"""Build an image from its definition with the docker engine, on a base that is pinned by digest."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ftkit import assets
from ftkit.checkout import own_checkout, read_commit
from ftkit.config.image import base_lock_text, read_base_lock
from ftkit.config.image_reference import Digest, NamedImage, RegistryImage, parse_name, parse_reference
from ftkit.errors import ConfigError, FtkitError, ImageError, NotFoundError, Problem
from ftkit.files import write_file
from ftkit.images import docker_engine
from ftkit.images.build_context import BuildContext, assemble
from ftkit.images.docker_engine import DockerImage
from ftkit.images.events import ProgressEvent, Report, ignore_progress
from ftkit.images.inside import PASSED
from ftkit.images.oci.connection import find_credentials
from ftkit.images.oci.registry import Registry
from ftkit.images.transfer import pull
from ftkit.process import without_control

if TYPE_CHECKING:
    from docker import APIClient

    from ftkit.config.load import ImageDefinition

SELF_CHECK = ("python3", "-m", "ftkit.images.inside")


@dataclass(frozen=True)
class BaseRequest:
    """How a build selects its base: by another name, by resolving its tag again (`repin`), or from docker by tag."""

    name: str | None = None
    repin: bool = False
    from_docker: bool = False


@dataclass(frozen=True)
class SelectedBase:
    """The base to build on: its reference, whether a lock has its digest, and whether a lock should record it."""

    image: RegistryImage
    is_recorded: bool = False
    is_to_be_recorded: bool = False


@dataclass(frozen=True)
class BuildResult:
    """The image and its base; the lock that now records the base's digest, and the digest its tag moved to, if any."""

    name: str
    image: DockerImage
    base: RegistryImage
    is_new: bool
    recorded: Path | None = None
    moved_to: Digest | None = None


def build(
    definition: ImageDefinition, request: BaseRequest, *, no_cache: bool = False, report: Report = ignore_progress
) -> BuildResult:
    """Build an image, unless its inputs are unchanged since the last build."""
    spec = definition.spec
    name = parse_name(spec.reference).docker_name
    context = assemble(definition)
    moved_to = None
    with docker_engine.connect() as client:
        base = select_base(definition, request, report)
        written = (request.name or spec.base.reference).removeprefix("docker://")
        found = docker_engine.inspect(client, base.image.pinned)
        if found is None and not base.image.digest:
            found = docker_engine.inspect(client, written)
        if found is None:
            pull(client, base.image, report)
            found = docker_engine.inspect_required(client, base.image.pinned, "check the engine's log: it was pulled")
        pinned = base.image
        if pinned.digest is None:  # that of the repository that the engine pulled it from
            names = {parse_reference(repository).repository: digest for repository, digest in found.repo_digests}
            pinned = replace(pinned, digest=names.get(pinned.repository))
        key = context.digest(f"{found.id} {base.image.digest or ''}")
        image = docker_engine.inspect(client, name)
        is_new = no_cache or image is None or image.config.labels.get(docker_engine.BUILD_KEY_LABEL) != key
        if image is None or is_new:
            moved_to = current_digest_if_moved(base) if base.is_recorded else None
            labels = docker_engine.make_labels(spec, read_commit(own_checkout())) | {
                "org.opencontainers.image.base.name": str(base.image),
                "ftkit.base-id": found.id,
                docker_engine.BUILD_KEY_LABEL: key,
                docker_engine.LOCK_LABEL: context.lock_sha256,
            }
            if pinned.digest:
                labels["org.opencontainers.image.base.digest"] = pinned.digest
            if base.image.digest is None:
                labels[docker_engine.UNPINNED_LABEL] = "true"
            image = _run_build(client, context, found.id, labels, no_cache=no_cache, report=report)
    recorded = record(definition, pinned) if base.is_to_be_recorded and pinned.digest else None
    return BuildResult(name, image, pinned, is_new=is_new, recorded=recorded, moved_to=moved_to)


def select_base(definition: ImageDefinition, request: BaseRequest, report: Report) -> SelectedBase:
    """Return the base with its digest from the definition, a lock, or its tag in the registry; without, from docker."""
    spec = definition.spec
    written = parse_reference(request.name or spec.base.reference)
    digest, is_recorded = spec.base.digest, definition.is_base_recorded
    if request.name is not None:
        known = (read_base_lock(path).get(written.tagged) for path in definition.base_locks)
        digest = written.digest or next((each for each in known if each), None)
        is_recorded = written.digest is None and digest is not None
    if request.repin and digest and not is_recorded:
        where, fix = str(definition.base_file), "Change it there, or leave it out and let the build record it."
        if request.name:
            where, fix = "--base", "Give it without a digest."
        raise ConfigError([Problem(where, "--repin", f"the base has a fixed digest: {digest}.", fix)])
    if digest and not request.repin:
        return SelectedBase(replace(written, digest=digest), is_recorded=is_recorded)
    if request.from_docker:
        return SelectedBase(written, is_to_be_recorded=True)
    report(ProgressEvent(f"resolving {written.tagged} at {written.host}"))
    with Registry(written, find_credentials(written.host), report) as registry:
        try:
            return SelectedBase(replace(written, digest=registry.resolve()), is_to_be_recorded=True)
        except (ImageError, NotFoundError) as error:
            raise type(error)(
                f"{written.host} does not resolve {written.tagged}, the base of {spec.reference}: {error.what}",
                meaning=error.meaning,
                fix=f"{error.fix}; or, if the docker engine here has the base: --allow-unpinned",
            ) from error


def current_digest_if_moved(base: SelectedBase) -> Digest | None:
    """Return the current digest of the base's tag in the registry; None if it is unchanged or can't be resolved."""
    tag = replace(base.image, digest=None)
    try:
        with Registry(tag, find_credentials(tag.host), ignore_progress, waits=()) as registry:
            current = registry.resolve()
    except FtkitError:
        return None
    return current if current != base.image.digest else None


def record(definition: ImageDefinition, base: RegistryImage) -> Path:
    """Record the base's digest in the first lock that may be written; never in one that ftkit ships."""
    if base.digest is None:
        raise AssertionError("a base without a digest can't be recorded")
    locks = definition.base_locks
    may_write = [os.access(each.parent, os.W_OK) and not each.is_relative_to(assets.CONTAINERS) for each in locks]
    number = may_write.index(True) if any(may_write) else len(locks) - 1
    path = locks[number]
    for lock in locks[:number]:
        if base.tagged in read_base_lock(lock):
            raise ImageError(
                f"{lock} records another digest of {base.tagged}, and you may not change it",
                fix="ask its owner to pin the base again, or define your own image with 'extends:'",
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, base_lock_text({**read_base_lock(path), base.tagged: base.digest}).encode())
    return path


def _run_build(
    client: APIClient, context: BuildContext, base_id: str, labels: dict[str, str], *, no_cache: bool, report: Report
) -> DockerImage:
    """Build and check the image; tag it only if both succeed."""
    try:
        events = client.build(
            fileobj=context.archive(labels), custom_context=True, nocache=no_cache, rm=True, forcerm=True, decode=True,
            buildargs={**context.arguments, "BASE_IMAGE": base_id},
            network_mode="host",  # the steps reach the same package index as this machine
        )  # fmt: skip
        image_id = follow_build(events, report)
    except docker_engine.docker_sdk().errors.APIError as error:
        raise docker_engine.as_image_error(error, "docker refused to build") from error
    report(ProgressEvent("checking the image from inside"))
    reference = labels[docker_engine.REFERENCE_LABEL]
    code, output = docker_engine.run_inside(client, image_id, list(SELF_CHECK))
    if code != 0 or PASSED not in output:
        output = output.strip() or f"the self-check ended with exit status {code} and no output"
        lines = "\n".join(f"    {line}" for line in output.splitlines()[-20:])
        raise ImageError(
            f"{reference} differs from its definition:\n{lines}",
            meaning="a package was replaced, is missing, or is incompatible with the base",
            fix="change its packages and lock it again; the image was not tagged",
        )
    client.tag(image_id, *NamedImage(reference).docker_name.split(":"))
    return docker_engine.inspect_required(client, image_id, "build it again")


_MAX_SHOWN_LINES: Final = 15
_STEP_WIDTH: Final = 76
_NOISE: Final = ("--->", "Removing intermediate container", "Successfully built")
_NO_INDEX: Final = "the build could not reach the package index: check the network, or set PIP_INDEX_URL"
_NO_CERTIFICATE: Final = "set PIP_CERT to your site's certificate bundle: the build copies it into the image"
_NO_PYTHON: Final = "the base needs python3 with pip, and /bin/sh: set another base with --base"
_ADVICE: Final = {
    "no space left": "free space on the docker engine's disk: docker system df",
    "do not match the hashes": "a package changed on its index since it was locked: write the lock again with "
    "'ftkit images lock NAME:TAG'",
    **dict.fromkeys(("certificate", "ssl"), _NO_CERTIFICATE),
    **dict.fromkeys(("newconnectionerror", "name resolution", "connection refused", "retry("), _NO_INDEX),
    **dict.fromkeys(("python3: not found", "no module named pip", 'exec: "/bin/sh"'), _NO_PYTHON),
    "": "see the lines above; --no-cache runs every step again",
}
"""Meanings by lowercase text in the output of a failed step; the first match counts."""


def follow_build(events: Iterable[Mapping[str, object]], report: Report) -> Digest:
    """Follow a build to its end and return the image's id; `report` gets each step and each line of output."""
    image_id, step = None, "sending the build context"
    lines: deque[str] = deque(maxlen=_MAX_SHOWN_LINES)
    for event in events:
        if "error" in event:
            output = "\n".join(f"    {line}" for line in (*lines, str(event["error"]).strip()))
            fix = next(advice for text, advice in _ADVICE.items() if text in output.lower())
            raise ImageError(f"the build failed in {step}\n{output}", fix=fix)
        for line in without_control(str(event.get("stream", ""))).splitlines():
            if line.startswith("Step "):
                step = " ".join(line.split())
                step = step if len(step) <= _STEP_WIDTH else step[: _STEP_WIDTH - 1] + "…"
                lines.clear()
                report(ProgressEvent("building", text=step))
            elif line.strip() and not line.lstrip().startswith(_NOISE):
                lines.append(line.rstrip())
                report(ProgressEvent("building", item="output", text=line.strip()))
        aux = event.get("aux")
        image_id = docker_engine.as_digest(aux.get("ID") if isinstance(aux, dict) else None) or image_id
    if not image_id:
        raise ImageError("docker ended the build without an image", fix="see the engine's log, and try again")
    return image_id
