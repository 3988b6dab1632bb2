"""Build an image from its definition, with the docker engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ftkit.config.image_reference import Digest, NamedImage, RegistryImage, parse_name
from ftkit.errors import ImageError
from ftkit.images import docker_engine
from ftkit.images.base import BaseRequest, current_digest_if_moved, digest_of, ensure_base, record, select_base
from ftkit.images.build_context import assemble
from ftkit.images.docker_engine import DockerImage
from ftkit.images.progress import ProgressEvent, Report, ignore_progress
from ftkit.images.self_check import PASSED
from ftkit.process import without_colors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from docker import APIClient

    from ftkit.config.load import ImageDefinition
    from ftkit.images.build_context import BuildContext

SELF_CHECK = ("python3", "-m", "ftkit.images.self_check")


@dataclass(frozen=True)
class BuildResult:
    """The result of a build: the image, its name in the docker engine, and its base.

    `recorded` is the lock that the base's digest was recorded in now, `moved_to` the current digest of the base's tag
    if it differs from the recorded one.
    """

    name: str
    image: DockerImage
    base: RegistryImage
    is_new: bool
    recorded: Path | None = None
    moved_to: Digest | None = None


def build(
    definition: ImageDefinition,
    request: BaseRequest,
    *,
    no_cache: bool = False,
    report: Report = ignore_progress,
) -> BuildResult:
    """Build an image, unless its inputs are unchanged since the last build.

    Raises:
        ConfigError: the name is not valid, or the base's digest is fixed and can't be resolved again.
        ImageError: the base's digest can't be resolved, the lock is stale, a step failed, or the image fails its
            self-check.
        NotFoundError: there is no such base.
        PrerequisiteError: no docker engine responds.
    """
    spec = definition.spec
    named = parse_name(spec.reference)
    context = assemble(definition)
    moved_to = None
    with docker_engine.connect() as client:
        base = select_base(definition, request, report)
        written = (request.name or spec.base.reference).removeprefix("docker://")
        found = ensure_base(client, base.image, written, report)
        pinned = base.image if base.image.digest else replace(base.image, digest=digest_of(found, base.image))
        key, name = context.digest(f"{found.id} {base.image.digest or ''}"), named.docker_name
        image = docker_engine.inspect(client, name)
        is_new = no_cache or image is None or image.labels.get(docker_engine.BUILD_KEY_LABEL) != key
        if image is None or is_new:
            moved_to = current_digest_if_moved(base) if base.is_recorded else None
            base_info = docker_engine.BaseInfo(
                str(base.image), pinned.digest, found.id, is_pinned=base.image.digest is not None
            )
            image_labels = docker_engine.make_labels(
                spec, base_info, lock_sha256=context.lock_sha256, build_key=key, commit=docker_engine.own_commit()
            )
            image = _run_build(client, context, found.id, image_labels, no_cache=no_cache, report=report)
    recorded = record(definition, pinned) if base.is_to_be_recorded and pinned.digest else None
    return BuildResult(name, image, pinned, is_new=is_new, recorded=recorded, moved_to=moved_to)


def _run_build(
    client: APIClient,
    context: BuildContext,
    base_id: str,
    image_labels: dict[str, str],
    *,
    no_cache: bool,
    report: Report,
) -> DockerImage:
    """Build and check the image; tag it only if both succeed."""
    import docker  # noqa: PLC0415

    arguments = {**context.arguments, "BASE_IMAGE": base_id}
    try:
        events = client.build(
            fileobj=context.archive(image_labels),
            custom_context=True,
            buildargs=arguments,
            nocache=no_cache,
            rm=True,
            forcerm=True,
            network_mode="host",  # the steps reach the same package index as this machine
            decode=True,
        )
        image_id = BuildFollower(report).follow(events)
    except docker.errors.APIError as error:
        raise docker_engine.as_image_error(error, "docker refused to build") from error
    report(ProgressEvent("checking the image from inside"))
    check_inside(client, image_id, image_labels[docker_engine.REFERENCE_LABEL])
    named = NamedImage(image_labels[docker_engine.REFERENCE_LABEL])
    client.tag(image_id, *named.docker_name.split(":"))
    return docker_engine.inspect_required(client, image_id, "build it again")


def check_inside(client: APIClient, image: str, reference: str) -> None:
    """Run the self-check in an image.

    Raises:
        ImageError: the check failed; the message lists every difference.
    """
    code, output = docker_engine.run_inside(client, image, list(SELF_CHECK))
    output = output.strip() or f"the self-check ended with exit status {code} and no output"
    if code != 0 or PASSED not in output:
        lines = "\n".join(f"    {line}" for line in output.splitlines()[-20:])
        raise ImageError(
            f"{reference} differs from its definition:\n{lines}",
            meaning="a package was replaced, is missing, or is incompatible with the base",
            fix="change its packages and lock it again; the image was not tagged",
        )


_MAX_SHOWN_LINES: Final = 15
_STEP_WIDTH: Final = 76
_NOISE: Final = ("--->", "Removing intermediate container", "Successfully built")


@dataclass
class BuildFollower:
    """Follow the docker engine's events during a build; `report` gets each step and each line of output."""

    report: Report
    step: str = "sending the build context"
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_SHOWN_LINES))
    image_id: Digest | None = None

    def follow(self, events: Iterable[dict[str, Any]]) -> Digest:
        """Follow a build to its end, and return the image's id.

        Raises:
            ImageError: a step failed; the message has its last lines.
        """
        for event in events:
            if "error" in event:
                raise self._failed(event)
            self._take(str(event.get("stream", "")))
            self.image_id = docker_engine.as_digest((event.get("aux") or {}).get("ID")) or self.image_id
        if not self.image_id:
            raise ImageError("docker ended the build without an image", fix="see the engine's log, and try again")
        return self.image_id

    def _take(self, text: str) -> None:
        for line in without_colors(text).splitlines():
            if line.startswith("Step "):
                self.step = _one_line(line)
                self.lines.clear()
                self.report(ProgressEvent("building", text=self.step))
            elif line.strip() and not line.lstrip().startswith(_NOISE):
                self.lines.append(line.rstrip())
                self.report(ProgressEvent("building", item="output", text=line.strip()))

    def _failed(self, event: dict[str, Any]) -> ImageError:
        output = "\n".join(f"    {line}" for line in (*self.lines, str(event["error"]).strip()))
        return ImageError(f"the build failed in {self.step}\n{output}", fix=_advice(output))


def _one_line(step: str) -> str:
    """Shorten a step of a Dockerfile to what fits on a narrow screen."""
    text = " ".join(step.split())
    return text if len(text) <= _STEP_WIDTH else text[: _STEP_WIDTH - 1] + "…"


def _advice(output: str) -> str:
    lower = output.lower()
    if "no space left" in lower:
        return "free space on the docker engine's disk: docker system df"
    if "do not match the hashes" in lower:
        return (
            "a package changed on its index since it was locked: write the lock again with 'ftkit images lock NAME:TAG'"
        )
    if any(word in lower for word in ("certificate", "ssl")):
        return "set PIP_CERT to your site's certificate bundle: the build copies it into the image"
    if any(word in lower for word in ("newconnectionerror", "name resolution", "connection refused", "retry(")):
        return "the build could not reach the package index: check the network, or set PIP_INDEX_URL"
    if any(text in lower for text in ("python3: not found", "no module named pip", 'exec: "/bin/sh"')):
        return "the base needs python3 with pip, and /bin/sh: set another base with --base"
    return "see the lines above; --no-cache runs every step again"
