"""Push an image to a registry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftkit.config.image_reference import Digest, NamedImage, RegistryImage
from ftkit.errors import ImageError
from ftkit.images import docker_engine
from ftkit.images.docker_engine import explain_transfer, follow_transfer
from ftkit.images.oci.access import find_credentials
from ftkit.images.oci.registry import Registry
from ftkit.images.progress import Report, ignore_progress, retry
from ftkit.images.signatures import sign_in_registry

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.images.oci.access import Credentials


@dataclass(frozen=True)
class PushResult:
    """An image in a registry."""

    reference: RegistryImage
    digest: Digest


def push(
    image: NamedImage,
    registry: str,
    *,
    given: Credentials | None = None,
    report: Report = ignore_progress,
) -> PushResult:
    """Push an image to `HOST/PATH/NAME:TAG`.

    Args:
        image: the image, which the docker engine has.
        registry: `HOST/PATH`.
        given: the credentials; docker's configuration if None.
        report: called with the progress.

    Raises:
        NotFoundError: the image was not built here.
        ImageError: the registry refused the credentials, or could not be reached after several attempts.
        PrerequisiteError: no docker engine responds, or the credential helper fails.
    """
    wanted = image.in_registry(registry)
    known = given or find_credentials(wanted.host)
    stage = f"pushing {wanted}"
    with docker_engine.connect() as client:
        import docker  # noqa: PLC0415 - `connect` has checked that it is installed

        built = docker_engine.inspect_required(client, image.docker_name, f"build it: ftkit build {image}")
        client.tag(built.id, wanted.repository, wanted.tag, force=True)

        def attempt() -> Digest | None:
            try:
                events = client.push(
                    wanted.repository,
                    tag=wanted.tag,
                    stream=True,
                    decode=True,
                    auth_config=known.for_docker() if known else None,
                )
                return follow_transfer(events, stage, report, wanted, known)
            except docker.errors.APIError as error:
                raise explain_transfer(str(error.explanation or error), wanted, known) from error

        digest = retry(attempt, report, stage)
    if not digest:
        raise ImageError(f"{wanted.host} accepted {wanted} without returning its digest", fix="see the registry's log")
    return PushResult(wanted, digest)


def sign_pushed(image: NamedImage, pushed: PushResult, key: Path, given: Credentials | None = None) -> Digest:
    """Sign an image that was pushed; return the digest of the signature in the registry.

    Raises:
        PrerequisiteError: ssh-keygen is missing, or refused the key.
        ImageError: the registry refuses the signature.
    """
    known = given or find_credentials(pushed.reference.host)
    with Registry(pushed.reference, known, ignore_progress) as registry:
        return sign_in_registry(registry, image, pushed.digest, key)
