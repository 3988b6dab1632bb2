"""Access the docker engine through its SDK, and convert its errors; labels of images that ftkit builds."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

import ftkit
from ftkit.config.image_reference import Digest
from ftkit.errors import ImageError, NotFoundError, PrerequisiteError, missing_package_error, one_line
from ftkit.images.oci.documents import RunConfig, invalid_document
from ftkit.images.squashfs import ImageConfig

if TYPE_CHECKING:
    from docker import APIClient

    from ftkit.checkout import Commit
    from ftkit.config.image import ImageSpec

_TIMEOUT_SECONDS = 600
_CHUNK = 1 << 20
_MAX_TIME = (1 << 32) - 1  # the latest time that squashfs can store, in seconds since 1970
_OWNER_LABEL = "ftkit.process"
"""Label with the process that created a container, as `HOST:PID`; the container must not outlive that process."""


@dataclass(frozen=True)
class DockerImage:
    """An image: the digest of its configuration, its unpacked size, and its manifest's digest by repository."""

    id: Digest
    size: int
    repo_digests: tuple[tuple[str, Digest], ...]
    config: ImageConfig


def docker_sdk() -> ModuleType:
    """Return the package `docker`, which is an extra, and slow to import; PrerequisiteError if it is not installed."""
    try:
        import docker  # noqa: PLC0415
    except ImportError as error:
        raise missing_package_error(["docker"]) from error
    return docker  # type: ignore[no-any-return] # it has no types


@contextmanager
def connect() -> Iterator[APIClient]:
    """Connect to the engine that docker's variables and configuration select; PrerequisiteError if none responds.

    A request that the engine refuses in the block becomes an ImageError.
    """
    docker = docker_sdk()
    options = docker.utils.kwargs_from_env() or {}
    if "base_url" not in options:
        options |= _current_context(docker)
    address = options["base_url"]
    try:
        if address.startswith("unix://"):  # if nothing listens there, the SDK leaves its own socket open
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.connect(address.removeprefix("unix://"))
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
    except docker.errors.APIError as error:
        raise as_image_error(error, "the docker engine refuses a request") from error
    finally:
        client.close()


def _current_context(docker: ModuleType) -> dict[str, object]:
    """Return the address and TLS settings of docker's current context, which rootless installations set."""
    name = os.environ.get("DOCKER_CONTEXT") or docker.context.config.get_current_context_name()
    reason = "it does not exist"
    try:
        context = docker.context.ContextAPI.get_context(name)
    except Exception as error:  # noqa: BLE001 - the SDK raises this type itself
        context, reason = None, one_line(error)
    if context is None:
        raise PrerequisiteError(
            f"can't use docker's context '{name}': {reason}",
            meaning="DOCKER_CONTEXT or docker's configuration selects it",
            fix="choose another one: docker context ls, docker context use NAME",
        )
    address = {"base_url": context.Host or "unix:///var/run/docker.sock"}
    return address if context.TLSConfig is None else address | {"tls": context.TLSConfig}


def inspect(client: APIClient, name: str) -> DockerImage | None:
    """Return an image; None if the engine has no image of that name."""
    docker = docker_sdk()
    try:
        found = client.inspect_image(name)
        config = RunConfig.model_validate(found.get("Config") or {})
        image_id = Digest(found["Id"])
    except docker.errors.ImageNotFound:
        return None
    except docker.errors.APIError as error:
        raise as_image_error(error, f"docker can't look up the image {name}") from error
    except ValidationError as error:
        raise invalid_document(error, f"docker's configuration of {name}") from error
    except ValueError as error:  # of very old engines
        raise ImageError(f"docker's id of {name} is not a digest: {error}", fix="see 'docker version'") from error
    repo_digests = (text.partition("@") for text in found.get("RepoDigests") or ())
    digests = tuple((name, known) for name, _, digest in repo_digests if (known := as_digest(digest)))
    return DockerImage(image_id, int(found.get("Size") or 0), digests, image_config(config, found.get("Created")))


def inspect_required(client: APIClient, name: str, fix: str) -> DockerImage:
    """Return an image that has to exist; `fix` is the advice if it does not."""
    image = inspect(client, name)
    if image is None:
        raise NotFoundError(f"docker has no image {name}", meaning="it was not built on this machine", fix=fix)
    return image


def image_config(config: RunConfig, created: object) -> ImageConfig:
    """Return an image's runtime configuration; `created` is RFC 3339 time; a missing or invalid one becomes 1970."""
    epoch = 0
    if isinstance(created, str):
        with suppress(ValueError, OverflowError):
            moment = datetime.fromisoformat(created)
            epoch = int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    return ImageConfig(
        environment=config.environment, entrypoint=config.entrypoint, command=config.command,
        working_directory=config.working_directory or "", volumes=tuple(sorted(config.volumes)), labels=config.labels,
        created=min(max(0, epoch), _MAX_TIME),
    )  # fmt: skip


@contextmanager
def _container(client: APIClient, image: str, **options: object) -> Iterator[str]:
    docker = docker_sdk()
    remove_abandoned(client)
    try:
        labels = {_OWNER_LABEL: f"{socket.gethostname()}:{os.getpid()}"}
        container_id: str = client.create_container(image, labels=labels, **options)["Id"]
    except docker.errors.APIError as error:
        raise as_image_error(error, f"docker can't create a container of {image}") from error
    try:
        yield container_id
    finally:
        with suppress(docker.errors.APIError):
            client.remove_container(container_id, force=True, v=True)


def remove_abandoned(client: APIClient) -> None:
    """Remove containers left by killed processes of this machine, which prevent removing their images."""
    for left in client.containers(all=True, filters={"label": _OWNER_LABEL}):
        host, _, pid = left["Labels"][_OWNER_LABEL].rpartition(":")
        if host == socket.gethostname() and not Path("/proc", pid).exists():
            with suppress(docker_sdk().errors.APIError):
                client.remove_container(left["Id"], force=True, v=True)


@contextmanager
def exported(client: APIClient, image: str) -> Iterator[io.BufferedReader]:
    with _container(client, image, command=["true"]) as container_id:
        # Not the SDK's `export`, which copies the stream several times, in chunks of 2 MiB.
        address = f"{client.base_url}/v{client.api_version}/containers/{container_id}/export"
        with client.get(address, stream=True, timeout=client.timeout) as response:
            if response.status_code != 200:  # noqa: PLR2004
                raise ImageError(f"docker can't export {image}: {response.text.strip()}", fix="see 'docker info'")
            response.raw.auto_close = False  # a reader reads once more after the end
            yield io.BufferedReader(response.raw, _CHUNK)


def run_inside(client: APIClient, image: str, command: list[str]) -> tuple[int, str]:
    """Run a program in a container without network; return its exit status and output."""
    with _container(client, image, command=command, entrypoint=[], network_disabled=True) as container_id:
        try:
            client.start(container_id)
            code = int(client.wait(container_id)["StatusCode"])
            output: bytes = client.logs(container_id, stdout=True, stderr=True)
        except docker_sdk().errors.APIError as error:
            raise as_image_error(error, f"docker can't run '{command[0]}' in {image}") from error
    return code, output.decode(errors="replace")


def as_image_error(error: Exception, what: str) -> ImageError:
    return ImageError(f"{what}: {_reason(error)}", fix="see 'docker info' and the engine's own log")


def _reason(error: Exception) -> str:
    """Return the engine's own message, without the HTTP library's text around it."""
    return one_line(getattr(error, "explanation", None) or error)


def as_digest(value: object) -> Digest | None:
    """Return a digest that the engine reported; None if the value is not a SHA-256 digest."""
    try:
        return Digest(str(value))
    except ValueError:
        return None


BUILD_KEY_LABEL: Final = "ftkit.build-key"
LOCK_LABEL: Final = "ftkit.lock-sha256"
REFERENCE_LABEL: Final = "ftkit.reference"
UNPINNED_LABEL: Final = "ftkit.base-unpinned"
_ZIP_EPOCH: Final = 315532800  # 1980-01-01 UTC, the earliest time that a zip file can store, in seconds since 1970


def make_labels(spec: ImageSpec, commit: Commit | None) -> dict[str, str]:
    """Return the labels of an image that is about to be built, except those about its base and its build."""
    given = os.environ.get("SOURCE_DATE_EPOCH", "")
    epoch = int(given) if given.isdigit() else commit.time if commit else _ZIP_EPOCH
    labels = {
        "org.opencontainers.image.title": spec.reference,
        "org.opencontainers.image.description": spec.description,
        "org.opencontainers.image.version": ftkit.__version__,
        "org.opencontainers.image.created": datetime.fromtimestamp(epoch, UTC).isoformat(),
        REFERENCE_LABEL: spec.reference,
        "ftkit.version": ftkit.__version__,
        "ftkit.families": ",".join(spec.families),
        "ftkit.default-recipe": spec.default_recipe or "",
        "ftkit.source-date-epoch": str(epoch),
    }
    if commit:
        labels["org.opencontainers.image.revision"] = commit.id
        labels["ftkit.has-uncommitted-changes"] = str(commit.has_changes).lower()
    return labels
