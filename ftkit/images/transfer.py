"""Push and pull images with the docker engine, and explain why a registry refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ftkit.errors import ImageError, NotFoundError
from ftkit.images import docker_engine
from ftkit.images.events import ProgressEvent, Report, TransientError, ignore_progress, retry
from ftkit.images.oci.connection import Credentials, access_denied, explain_tls, find_credentials
from ftkit.images.oci.registry import Registry
from ftkit.images.signatures import sign_in_registry

if TYPE_CHECKING:
    from docker import APIClient

    from ftkit.config.image_reference import Digest, NamedImage, RegistryImage


def push(
    image: NamedImage, registry: str, *, given: Credentials | None = None, report: Report = ignore_progress
) -> tuple[RegistryImage, Digest]:
    """Push an image with the given credentials or docker's configured ones; return its address and digest."""
    wanted = image.in_registry(registry)
    known = given or find_credentials(wanted.host)
    login = {"username": known.username, "password": known.password} if known else None
    with docker_engine.connect() as client:
        built = docker_engine.inspect_required(client, image.docker_name, f"build it: ftkit build {image}")
        client.tag(built.id, wanted.repository, wanted.tag, force=True)
        start = partial(client.push, wanted.repository, tag=wanted.tag, auth_config=login)
        digest = transfer(start, f"pushing {wanted}", report, wanted, known, pushes=True)
    if not digest:
        raise ImageError(f"{wanted.host} accepted {wanted} without returning its digest", fix="see the registry's log")
    return wanted, digest


def pull(client: APIClient, wanted: RegistryImage, report: Report) -> None:
    start = partial(client.pull, wanted.repository, tag=wanted.digest or wanted.tag)
    transfer(start, f"pulling {wanted}", report, wanted, find_credentials(wanted.host))


def sign_pushed(
    image: NamedImage, pushed: RegistryImage, digest: Digest, key: Path, given: Credentials | None = None
) -> Digest:
    """Sign an image that was pushed; return the digest of the signature in the registry."""
    with Registry(pushed, given or find_credentials(pushed.host), ignore_progress) as registry:
        return sign_in_registry(registry, image, digest, key)


_FINAL_STATUSES: Final = (
    "Pull complete", "Download complete", "Pushed", "Layer already exists", "Already exists", "Mounted from",
)  # fmt: skip
_ACCESS_DENIED: Final = (
    "unauthorized", "authentication required", "no basic auth", "denied", "forbidden", "401",
    "incorrect username or password",
)  # fmt: skip
_NOT_FOUND: Final = ("not found", "manifest unknown", "name unknown", "does not exist", "repository name not known")
_TRANSIENT: Final = (
    "connection refused", "connection reset", "timeout", "timed out", "eof", "no such host", "temporary failure",
    "too many requests", "bad gateway", "service unavailable", "internal server error", "broken pipe", "i/o",
)  # fmt: skip


def transfer(
    start: Callable[..., Iterable[Mapping[str, object]]],
    stage: str,
    report: Report,
    wanted: RegistryImage,
    known: Credentials | None,
    *,
    pushes: bool = False,
) -> Digest | None:
    """Follow a pull or push of docker's SDK to its end; return the manifest's digest, None if the engine sent none."""

    def attempt() -> Digest | None:
        digest: object = ""
        try:
            for event in start(stream=True, decode=True):
                if "error" in event:
                    raise explain_transfer(str(event["error"]), wanted, known, pushes=pushes)
                status = str(event.get("status", ""))
                if layer := str(event.get("id", "")):
                    detail = event.get("progressDetail")
                    detail = detail if isinstance(detail, dict) else {}
                    is_over = status.startswith(_FINAL_STATUSES)
                    done, total = detail.get("current"), detail.get("total")
                    report(ProgressEvent(stage, layer, f"{layer} {status}", done, total, is_over))
                aux = event.get("aux")
                digest = aux.get("Digest", digest) if isinstance(aux, dict) else digest
                if status.startswith("Digest: "):
                    digest = status.removeprefix("Digest: ")
        except docker_engine.docker_sdk().errors.APIError as error:
            raise explain_transfer(str(error.explanation or error), wanted, known, pushes=pushes) from error
        return docker_engine.as_digest(digest)

    return retry(attempt, report, stage)


def explain_transfer(
    message: str, reference: RegistryImage, known: Credentials | None, *, pushes: bool = False
) -> ImageError | NotFoundError:
    lower = message.lower()
    if "no space left" in lower:
        return ImageError(f"the docker engine's disk is full: {message}", fix="free space: docker system df")
    if "x509:" in lower or "server gave http response" in lower:
        return explain_tls(reference.host, message)
    if any(word in lower for word in _ACCESS_DENIED):
        return access_denied(reference, known, message, pushes=pushes)
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
