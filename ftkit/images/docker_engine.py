"""The docker engine, through its SDK, with errors as ftkit reports them."""

from __future__ import annotations

import contextlib
import io
import os
import socket
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ftkit.config.image_reference import Digest
from ftkit.errors import ImageError, NotFoundError, PrerequisiteError, one_line
from ftkit.images.oci import credentials as who
from ftkit.images.oci.documents import RunConfig, read_run_config
from ftkit.images.oci.rootfs import ImageConfig
from ftkit.images.oci.transfer import TransientError
from ftkit.images.progress import ProgressEvent, Report

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from docker import APIClient

    from ftkit.config.image_reference import RegistryImage
    from ftkit.images.oci.credentials import Credentials

_TIMEOUT_SECONDS = 600
_CHUNK = 1 << 20
_DEFAULT_HOST = "unix:///var/run/docker.sock"
_LATEST = (1 << 32) - 1
"""The latest time that squashfs can hold, in seconds since 1970."""

_OWNER = "ftkit.process"
"""Label with the process that a container must not outlive."""


@dataclass(frozen=True)
class DockerImage:
    """An image in the docker engine; `repo_digests`: the digest of its manifest in each repository."""

    id: Digest
    size: int
    created: int
    labels: dict[str, str]
    repo_digests: tuple[tuple[str, Digest], ...]
    config: ImageConfig


@contextmanager
def connect() -> Iterator[APIClient]:
    """Connect to the engine that docker's own variables and files set.

    Raises:
        PrerequisiteError: the SDK is not installed, or no engine answers.
    """
    try:
        import docker  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise PrerequisiteError(
            "the Python package 'docker' is not installed", fix="pip install 'ftkit[images]'"
        ) from error
    try:
        _knock()
        client: APIClient = docker.from_env(timeout=_TIMEOUT_SECONDS).api
    except (docker.errors.DockerException, OSError) as error:
        raise PrerequisiteError(
            f"no docker engine answers at {_address()}: {_reason(error)}",
            meaning="docker is not installed or not started here, or you are not in the group 'docker'",
            fix="check that 'docker info' works; DOCKER_HOST sets an engine elsewhere",
        ) from error
    try:
        yield client
    finally:
        client.close()


def _knock() -> None:
    """See whether something listens on the engine's socket: the SDK leaves its own open when nothing does."""
    address = _address()
    if address.startswith("unix://"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knocking:
            knocking.connect(address.removeprefix("unix://"))


def _address() -> str:
    return os.environ.get("DOCKER_HOST") or _DEFAULT_HOST


def inspect(client: APIClient, name: str) -> DockerImage | None:
    """Inspect an image; None if the engine has none of that name."""
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
    """Inspect an image that has to exist.

    Raises:
        NotFoundError: the engine does not have it.
    """
    image = inspect(client, name)
    if image is None:
        raise NotFoundError(f"docker has no image {name}", meaning="it was not built on this machine", fix=fix)
    return image


def image_config(config: RunConfig, created: object) -> ImageConfig:
    """Return an image's configuration to run it."""
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
        with contextlib.suppress(ValueError):  # of another algorithm: no digest that an image could be held to here
            yield repository, Digest(digest)


def _image_id(text: object, name: str) -> Digest:
    """Return an image's id, which all engines but very old ones write as a digest."""
    try:
        return Digest(str(text))
    except ValueError as error:
        raise ImageError(f"docker's id of {name} is none: {error}", fix="see 'docker version'") from error


@contextmanager
def container(client: APIClient, image: str, **options: Any) -> Iterator[str]:
    """Create a container, and remove it at the end of the block."""
    import docker  # noqa: PLC0415

    remove_abandoned(client)
    try:
        made: str = client.create_container(image, labels={_OWNER: f"{socket.gethostname()}:{os.getpid()}"}, **options)[
            "Id"
        ]
    except docker.errors.APIError as error:
        raise as_image_error(error, f"docker can't make a container of {image}") from error
    try:
        yield made
    finally:
        with contextlib.suppress(docker.errors.APIError):
            client.remove_container(made, force=True, v=True)


def remove_abandoned(client: APIClient) -> None:
    """Remove containers of killed processes of this machine, each of which keeps its image from being removed."""
    import docker  # noqa: PLC0415

    for made in client.containers(all=True, filters={"label": _OWNER}):
        host, _, pid = made["Labels"][_OWNER].rpartition(":")
        if host == socket.gethostname() and not Path("/proc", pid).exists():
            with contextlib.suppress(docker.errors.APIError):
                client.remove_container(made["Id"], force=True, v=True)


@contextmanager
def exported(client: APIClient, image: str) -> Iterator[io.BufferedReader]:
    """Open the root file system of an image as a tar stream."""
    with container(client, image, command=["true"]) as made:
        # A request of its own, since the SDK's `export` cuts the stream into 2 MiB copies of copies.
        address = f"{client.base_url}/v{client.api_version}/containers/{made}/export"
        answer = client.get(address, stream=True, timeout=client.timeout)
        with answer:
            if answer.status_code != 200:  # noqa: PLR2004
                raise ImageError(f"docker can't export {image}: {answer.text.strip()}", fix="see 'docker info'")
            yield io.BufferedReader(_Body(answer.raw), _CHUNK)


class _Body(io.RawIOBase):
    """The body of an answer, read as a file."""

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
    with container(client, image, **options) as made:
        try:
            client.start(made)
            code = int(client.wait(made)["StatusCode"])
            output = client.logs(made, stdout=True, stderr=True)
        except docker.errors.APIError as error:
            raise as_image_error(error, f"docker can't run '{command[0]}' in {image}") from error
    return code, output.decode(errors="replace")


def as_image_error(error: Exception, what: str) -> ImageError:
    """Convert an error of the SDK."""
    return ImageError(f"{what}: {_reason(error)}", fix="see 'docker info' and the engine's own log")


def _reason(error: Exception) -> str:
    """Return the engine's own words, without the HTTP library's around them."""
    return one_line(getattr(error, "explanation", None) or error)


def _epoch(value: object) -> int:
    """Return seconds since 1970 of docker's time (with nanoseconds); 0 for none or one before."""
    if not isinstance(value, str) or not value:
        return 0
    try:
        moment = datetime.fromisoformat(value.partition(".")[0].removesuffix("Z") + "+00:00")
        return min(max(0, int(moment.timestamp())), _LATEST)
    except (ValueError, OverflowError):
        return 0


_SETTLED: Final = (
    "Pull complete",
    "Download complete",
    "Pushed",
    "Layer already exists",
    "Already exists",
    "Mounted from",
)
_REFUSED: Final = (
    "unauthorized",
    "authentication required",
    "no basic auth",
    "denied",
    "forbidden",
    "401",
    "incorrect username or password",
)
_UNKNOWN: Final = ("not found", "manifest unknown", "name unknown", "does not exist", "repository name not known")
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
        ImageError: the registry does not let us in.
        NotFoundError: it has no such image.
        TransientError: the connection was lost.
    """
    told = ""
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
                    is_over=status.startswith(_SETTLED),
                )
            )
        told = (event.get("aux") or {}).get("Digest", told)
        if status.startswith("Digest: "):
            told = status.removeprefix("Digest: ")
    return as_digest(told)


def as_digest(told: object) -> Digest | None:
    """Return a digest reported by the engine; None for anything else."""
    try:
        return Digest(str(told))
    except ValueError:
        return None


def explain_transfer(message: str, reference: RegistryImage, known: Credentials | None) -> ImageError | NotFoundError:
    """Turn the engine's message about a registry into an error."""
    lower = message.lower()
    if "no space left" in lower:
        return ImageError(f"the docker engine's disk is full: {message}", fix="make room: docker system df")
    if any(word in lower for word in _REFUSED):
        return who.access_denied(reference, known, message)
    if any(word in lower for word in _UNKNOWN):
        return NotFoundError(
            f"image {reference} not found: {message}",
            meaning="the name, tag or digest is wrong, or the repository is private",
            fix=f"check its tags; if it is private: docker login {reference.host}",
        )
    if any(word in lower for word in _TRANSIENT):
        return TransientError(
            f"lost the connection to {reference.host}: {message}",
            meaning="the registry or the network between is down, or the host's name is wrong",
            fix="try again: transferred layers are not transferred again",
        )
    return ImageError(f"{reference.host}: {message}", fix="see the registry's log")
