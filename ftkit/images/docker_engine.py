"""The docker engine, through its SDK; its errors become ftkit's."""

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

from ftkit.config.image_reference import Digest
from ftkit.errors import ImageError, NotFoundError, PrerequisiteError, one_line
from ftkit.images.oci.access import access_denied, explain_tls
from ftkit.images.oci.documents import RunConfig, read_run_config
from ftkit.images.oci.rootfs import ImageConfig
from ftkit.images.progress import ProgressEvent, Report, TransientError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from docker import APIClient

    from ftkit.config.image_reference import RegistryImage
    from ftkit.images.oci.access import Credentials

_TIMEOUT_SECONDS = 600
_CHUNK = 1 << 20
_DEFAULT_HOST = "unix:///var/run/docker.sock"
_MAX_TIME = (1 << 32) - 1
"""The latest time that squashfs can store, in seconds since 1970."""

_OWNER_LABEL = "ftkit.process"
"""Label of a container: the process that created it, as `HOST:PID`; the container must not outlive it."""


@dataclass(frozen=True)
class DockerImage:
    """An image in the docker engine.

    Attributes:
        id: digest of its configuration.
        size: unpacked size in bytes.
        created: when it was built, in seconds since 1970.
        labels: its labels.
        repo_digests: repositories that have it, and the digest of its manifest in each.
        config: how it is run.
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


_FINAL_STATUSES: Final = (
    "Pull complete",
    "Download complete",
    "Pushed",
    "Layer already exists",
    "Already exists",
    "Mounted from",
)
_ACCESS_DENIED: Final = (
    "unauthorized",
    "authentication required",
    "no basic auth",
    "denied",
    "forbidden",
    "401",
    "incorrect username or password",
)
_NOT_FOUND: Final = ("not found", "manifest unknown", "name unknown", "does not exist", "repository name not known")
_TRANSIENT: Final = (
    "connection refused",
    "connection reset",
    "timeout",
    "timed out",
    "eof",
    "no such host",
    "temporary failure",
    "too many requests",
    "bad gateway",
    "service unavailable",
    "internal server error",
    "broken pipe",
    "i/o",
)


def follow_transfer(
    events: Iterable[dict[str, Any]], stage: str, report: Report, reference: RegistryImage, known: Credentials | None
) -> Digest | None:
    """Follow a pull or push to its end, and return the digest of the manifest; None if the engine sent none.

    Raises:
        ImageError: the registry denies access.
        NotFoundError: it has no such image.
        TransientError: the connection was lost.
    """
    digest = ""
    for event in events:
        if "error" in event:
            raise explain_transfer(str(event["error"]), reference, known)
        status = str(event.get("status", ""))
        if layer := str(event.get("id", "")):
            detail = event.get("progressDetail") or {}
            report(
                ProgressEvent(
                    stage,
                    item=layer,
                    text=f"{layer} {status}",
                    done=detail.get("current"),
                    total=detail.get("total"),
                    is_over=status.startswith(_FINAL_STATUSES),
                )
            )
        digest = (event.get("aux") or {}).get("Digest", digest)
        if status.startswith("Digest: "):
            digest = status.removeprefix("Digest: ")
    return as_digest(digest)


def as_digest(value: object) -> Digest | None:
    """Return a digest that the engine reported; None if the value is not a digest."""
    try:
        return Digest(str(value))
    except ValueError:
        return None


def explain_transfer(message: str, reference: RegistryImage, known: Credentials | None) -> ImageError | NotFoundError:
    """Convert the engine's message about a registry to an error."""
    lower = message.lower()
    if "no space left" in lower:
        return ImageError(f"the docker engine's disk is full: {message}", fix="free space: docker system df")
    if "x509:" in lower or "server gave http response" in lower:
        return explain_tls(reference.host, message)
    if any(word in lower for word in _ACCESS_DENIED):
        return access_denied(reference, known, message)
    if any(word in lower for word in _NOT_FOUND):
        return NotFoundError(
            f"image {reference} not found: {message}",
            meaning="the name, tag or digest is wrong, or the repository is private",
            fix=f"check its tags; if it is private: docker login {reference.host}",
        )
    if any(word in lower for word in _TRANSIENT):
        return TransientError(
            f"lost the connection to {reference.host}: {message}",
            meaning="the registry or the network in between is down, or the host's name is wrong",
            fix="try again: finished layers are not transferred again",
        )
    return ImageError(f"{reference.host}: {message}", fix="see the registry's log")
