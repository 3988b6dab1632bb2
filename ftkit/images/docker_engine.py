"""The docker engine, through its SDK; its errors become ftkit's. The labels of the images that ftkit builds."""

from __future__ import annotations

import contextlib
import io
import os
import socket
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ftkit
from ftkit.checkout import own_checkout, read_commit
from ftkit.config.image_reference import Digest
from ftkit.errors import ImageError, NotFoundError, PrerequisiteError, one_line
from ftkit.images.oci.documents import RunConfig, read_run_config
from ftkit.images.squashfs import ImageConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from docker import APIClient

    from ftkit.checkout import Commit
    from ftkit.config.image import ImageSpec


_TIMEOUT_SECONDS = 600
_CHUNK = 1 << 20
_DEFAULT_HOST = "unix:///var/run/docker.sock"
_MAX_TIME = (1 << 32) - 1
"""The latest time that squashfs can store, in seconds since 1970."""

_OWNER_LABEL = "ftkit.process"
"""Label of a container: the process that created it, as `HOST:PID`; the container must not outlive it."""


@dataclass(frozen=True)
class DockerImage:
    """An image in the docker engine: `id` is its configuration's digest, `size` its unpacked bytes.

    `repo_digests` has the repositories that have it, with the digest of its manifest in each.
    """

    id: Digest
    size: int
    created: int
    labels: dict[str, str]
    repo_digests: tuple[tuple[str, Digest], ...]
    config: ImageConfig


@contextmanager
def connect() -> Iterator[APIClient]:
    """Connect to the engine that docker's environment variables and configuration select.

    Raises:
        PrerequisiteError: the SDK is not installed, or no engine responds.
    """
    try:
        import docker  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise PrerequisiteError(
            "the Python package 'docker' is not installed", fix="pip install 'ftkit[images]'"
        ) from error
    options = _options()
    address = options["base_url"]
    try:
        _require_listening(address)
        client: APIClient = docker.APIClient(timeout=_TIMEOUT_SECONDS, **options)
    except (docker.errors.DockerException, OSError) as error:
        fix = "check that 'docker info' works; DOCKER_HOST or 'docker context use' selects another engine"
        if "paramiko" in str(error):
            fix = "pip install 'docker[ssh]'"
        raise PrerequisiteError(
            f"no docker engine answers at {address}: {_reason(error)}",
            meaning="docker is not installed or not started here, or you are not in the group 'docker'",
            fix=fix,
        ) from error
    try:
        yield client
    finally:
        client.close()


def _options() -> dict[str, Any]:
    """Return the engine's address and TLS settings, as docker's own client selects them.

    These are DOCKER_HOST, or else those of the current context, which rootless installations set.

    Raises:
        PrerequisiteError: the context can't be read.
    """
    import docker  # noqa: PLC0415
    from docker.context import ContextAPI  # noqa: PLC0415
    from docker.context.config import get_current_context_name  # noqa: PLC0415

    options: dict[str, Any] = docker.utils.kwargs_from_env()
    if "base_url" in options:
        return options
    name = os.environ.get("DOCKER_CONTEXT") or get_current_context_name()
    try:
        context, reason = ContextAPI.get_context(name), "it does not exist"
    except Exception as error:  # noqa: BLE001 - the SDK raises this type itself
        context, reason = None, one_line(error)
    if context is None:
        raise PrerequisiteError(
            f"can't use docker's context '{name}': {reason}",
            meaning="DOCKER_CONTEXT or docker's configuration selects it",
            fix="choose another one: docker context ls, docker context use NAME",
        )
    options["base_url"] = context.Host or _DEFAULT_HOST
    if context.TLSConfig is not None:
        options["tls"] = context.TLSConfig
    return options


def _require_listening(address: str) -> None:
    """Raise OSError if nothing listens on the engine's socket: the SDK would leave its own socket open then."""
    if address.startswith("unix://"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(address.removeprefix("unix://"))


def inspect(client: APIClient, name: str) -> DockerImage | None:
    """Return an image; None if the engine has none of that name.

    Raises:
        ImageError: the engine can't look it up.
    """
    import docker  # noqa: PLC0415

    try:
        found = client.inspect_image(name)
    except docker.errors.ImageNotFound:
        return None
    except docker.errors.APIError as error:
        raise as_image_error(error, f"docker can't look up the image {name}") from error
    config = read_run_config(found.get("Config") or {}, f"docker's configuration of {name}")
    return DockerImage(
        id=_image_id(found["Id"], name),
        size=int(found.get("Size") or 0),
        created=_epoch(found.get("Created")),
        labels=config.labels,
        repo_digests=tuple(_repo_digests(found.get("RepoDigests") or ())),
        config=image_config(config, found.get("Created")),
    )


def inspect_required(client: APIClient, name: str, fix: str) -> DockerImage:
    """Return an image that has to exist; `fix` is the advice if it does not.

    Raises:
        NotFoundError: the engine does not have it.
    """
    image = inspect(client, name)
    if image is None:
        raise NotFoundError(f"docker has no image {name}", meaning="it was not built on this machine", fix=fix)
    return image


def image_config(config: RunConfig, created: object) -> ImageConfig:
    """Return how an image is run."""
    return ImageConfig(
        environment=config.environment,
        entrypoint=config.entrypoint,
        command=config.command,
        working_directory=config.working_directory or "",
        volumes=tuple(sorted(config.volumes)),
        labels=config.labels,
        created=_epoch(created),
    )


def _repo_digests(texts: Iterable[str]) -> Iterator[tuple[str, Digest]]:
    for text in texts:
        repository, _, digest = text.partition("@")
        with contextlib.suppress(ValueError):  # a digest of another algorithm, which ftkit can't verify
            yield repository, Digest(digest)


def _image_id(text: object, name: str) -> Digest:
    """Return an image's id, which is a digest in all but very old engines.

    Raises:
        ImageError: it is not a digest.
    """
    try:
        return Digest(str(text))
    except ValueError as error:
        raise ImageError(f"docker's id of {name} is not a digest: {error}", fix="see 'docker version'") from error


@contextmanager
def container(client: APIClient, image: str, **options: Any) -> Iterator[str]:
    """Create a container, and remove it at the end of the block."""
    import docker  # noqa: PLC0415

    remove_abandoned(client)
    try:
        labels = {_OWNER_LABEL: f"{socket.gethostname()}:{os.getpid()}"}
        container_id: str = client.create_container(image, labels=labels, **options)["Id"]
    except docker.errors.APIError as error:
        raise as_image_error(error, f"docker can't create a container of {image}") from error
    try:
        yield container_id
    finally:
        with contextlib.suppress(docker.errors.APIError):
            client.remove_container(container_id, force=True, v=True)


def remove_abandoned(client: APIClient) -> None:
    """Remove containers that killed processes of this machine left: each keeps its image from being removed."""
    import docker  # noqa: PLC0415

    for left in client.containers(all=True, filters={"label": _OWNER_LABEL}):
        host, _, pid = left["Labels"][_OWNER_LABEL].rpartition(":")
        if host == socket.gethostname() and not Path("/proc", pid).exists():
            with contextlib.suppress(docker.errors.APIError):
                client.remove_container(left["Id"], force=True, v=True)


@contextmanager
def exported(client: APIClient, image: str) -> Iterator[io.BufferedReader]:
    """Open the root file system of an image as a tar stream."""
    with container(client, image, command=["true"]) as container_id:
        # Not the SDK's `export`, which copies the stream several times, in chunks of 2 MiB.
        address = f"{client.base_url}/v{client.api_version}/containers/{container_id}/export"
        response = client.get(address, stream=True, timeout=client.timeout)
        with response:
            if response.status_code != 200:  # noqa: PLR2004
                raise ImageError(f"docker can't export {image}: {response.text.strip()}", fix="see 'docker info'")
            yield io.BufferedReader(_Body(response.raw), _CHUNK)


class _Body(io.RawIOBase):
    """The body of a response, as a file to read."""

    def __init__(self, raw: Any) -> None:
        self._chunks: Iterator[bytes] = raw.stream(_CHUNK, decode_content=False)
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            self._left = memoryview(next(self._chunks, b""))
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size


def run_inside(client: APIClient, image: str, command: list[str]) -> tuple[int, str]:
    """Run a program in a container without network; return its exit status and output."""
    import docker  # noqa: PLC0415

    options = {"command": command, "entrypoint": [], "network_disabled": True}
    with container(client, image, **options) as container_id:
        try:
            client.start(container_id)
            code = int(client.wait(container_id)["StatusCode"])
            output = client.logs(container_id, stdout=True, stderr=True)
        except docker.errors.APIError as error:
            raise as_image_error(error, f"docker can't run '{command[0]}' in {image}") from error
    return code, output.decode(errors="replace")


def as_image_error(error: Exception, what: str) -> ImageError:
    """Convert an error of the SDK."""
    return ImageError(f"{what}: {_reason(error)}", fix="see 'docker info' and the engine's own log")


def _reason(error: Exception) -> str:
    """Return the engine's own message, without the HTTP library's text around it."""
    return one_line(getattr(error, "explanation", None) or error)


def _epoch(value: object) -> int:
    """Convert an RFC 3339 time, as docker writes it, to seconds since 1970; 0 if it is missing, invalid or earlier."""
    if not isinstance(value, str) or not value:
        return 0
    try:
        moment = datetime.fromisoformat(value)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return min(max(0, int(moment.timestamp())), _MAX_TIME)
    except (ValueError, OverflowError):
        return 0


def as_digest(value: object) -> Digest | None:
    """Return a digest that the engine reported; None if the value is not a digest."""
    try:
        return Digest(str(value))
    except ValueError:
        return None


BUILD_KEY_LABEL: Final = "ftkit.build-key"
LOCK_LABEL: Final = "ftkit.lock-sha256"
REFERENCE_LABEL: Final = "ftkit.reference"
UNPINNED_LABEL: Final = "ftkit.base-unpinned"
_ZIP_EPOCH: Final = 315532800
"""1980-01-01 UTC, the earliest time that a zip file can store, in seconds since 1970."""


@dataclass(frozen=True)
class BaseInfo:
    """The base of an image; `digest` is None if the engine knows none, `is_pinned` if the build selected it by that."""

    reference: str
    digest: Digest | None
    id: Digest
    is_pinned: bool


def own_commit() -> Commit | None:
    """Return the commit of the checkout that ftkit runs from; None for an installed wheel."""
    checkout = own_checkout()
    return read_commit(checkout) if checkout else None


def make_labels(
    spec: ImageSpec, base: BaseInfo, *, lock_sha256: str, build_key: str, commit: Commit | None
) -> dict[str, str]:
    """Return the labels of an image that is about to be built."""
    given = os.environ.get("SOURCE_DATE_EPOCH", "")
    epoch = int(given) if given.isdigit() else commit.time if commit else _ZIP_EPOCH
    labels = {
        "org.opencontainers.image.title": spec.reference,
        "org.opencontainers.image.description": spec.description,
        "org.opencontainers.image.version": ftkit.__version__,
        "org.opencontainers.image.created": datetime.fromtimestamp(epoch, UTC).isoformat(),
        "org.opencontainers.image.base.name": base.reference,
        REFERENCE_LABEL: spec.reference,
        BUILD_KEY_LABEL: build_key,
        "ftkit.version": ftkit.__version__,
        "ftkit.base-id": base.id,
        LOCK_LABEL: lock_sha256,
        "ftkit.families": ",".join(spec.families),
        "ftkit.default-recipe": spec.default_recipe or "",
        "ftkit.source-date-epoch": str(epoch),
    }
    if base.digest:
        labels["org.opencontainers.image.base.digest"] = base.digest
    if not base.is_pinned:
        labels[UNPINNED_LABEL] = "true"
    if commit:
        labels["org.opencontainers.image.revision"] = commit.id
        labels["ftkit.has-uncommitted-changes"] = str(commit.has_changes).lower()
    return labels
