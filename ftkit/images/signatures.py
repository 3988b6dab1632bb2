"""Signatures of images: next to the image in a registry, and next to imported files.

In a registry, a short statement is signed, `NAME:TAG has this digest`, so that a signed image can't be passed off as
another one.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel, ConfigDict

from ftkit.config.image_reference import Digest  # noqa: TC001 - pydantic reads it at run time
from ftkit.errors import ImageError, NotFoundError
from ftkit.images.oci.documents import parse_json
from ftkit.images.oci.referrers import Blob, attach, attached
from ftkit.images.store import manifest_file
from ftkit.runs.signing import Purpose, SignatureError, sign, verify, verify_beside

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftkit.config.image_reference import NamedImage
    from ftkit.images.oci.registry import Registry

SIGNED_AS: Final[Purpose] = "ftkit-image"
_ARTIFACT_TYPE: Final = "application/vnd.ftkit.image-signature.v1"
_STATEMENT_TYPE: Final = "application/vnd.ftkit.image-statement.v1+json"
_SIGNATURE_TYPE: Final = "application/vnd.ftkit.signature.ssh"


class Statement(BaseModel):
    """The signed statement.

    Attributes:
        type: the kind of statement, and its version.
        image: `NAME:TAG`.
        digest: digest of the image's manifest or index.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: str = "ftkit image signature v1"
    image: str
    digest: Digest

    def to_bytes(self) -> bytes:
        """Return the statement's canonical JSON, which is signed."""
        return json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":")).encode()


def sign_in_registry(registry: Registry, image: NamedImage, digest: Digest, key: Path) -> Digest:
    """Sign an image in a registry, and return the digest of the artifact with the signature.

    Args:
        registry: the image's repository.
        image: the name that it was pushed under.
        digest: digest of its manifest or index.
        key: the private key.

    Raises:
        PrerequisiteError: ssh-keygen is missing, or refused the key.
        ImageError: the registry refuses the signature.
    """
    statement = Statement(image=image.reference, digest=digest).to_bytes()
    with tempfile.TemporaryDirectory(prefix="ftkit-") as folder:
        path = Path(folder, "statement.json")
        path.write_bytes(statement)
        signature = sign(path, key, SIGNED_AS).read_bytes()
    blobs = (Blob(_STATEMENT_TYPE, statement), Blob(_SIGNATURE_TYPE, signature))
    return attach(registry, digest, _ARTIFACT_TYPE, blobs)


def require_in_registry(registry: Registry, name: NamedImage | None, digests: Sequence[Digest], key: Path) -> None:
    """Refuse an image in a registry that is not signed.

    Args:
        registry: the image's repository.
        name: the required name; None if the image was requested by digest, so that its name does not matter.
        digests: digest of its manifest, and of the index that refers to it: a signature of either is enough.
        key: the public key, or the file of allowed signers.

    Raises:
        ImageError: no signature matches; the message has the reason for each.
        PrerequisiteError: the key can't be read, or ssh-keygen is missing.
    """
    refused = list[str]()
    for digest in digests:
        for blobs in attached(registry, digest, _ARTIFACT_TYPE):
            reason = _reason_to_refuse(blobs, name, digest, key)
            if reason is None:
                return
            refused.append(reason)
    image = f"{name or digests[0]}"
    if not refused:
        raise ImageError(
            f"{image} is not signed: the registry has no signature of {digests[0]}",
            meaning="it was pushed without --sign, the tag was moved to another image, or it was copied without its"
            " signatures",
            fix=f"sign it on the machine that it was built on: ftkit push {name or 'NAME:TAG'} --sign --key FILE",
        )
    raise ImageError(
        "\n    ".join((f"no signature of {image} matches {key}:", *refused)),
        meaning="somebody else signed it, or the image or its signature was changed",
        fix="don't use it before you know who pushed it; or give the right public key",
    )


def _reason_to_refuse(blobs: Sequence[Blob], name: NamedImage | None, digest: Digest, key: Path) -> str | None:
    """Return why an artifact's signature is not accepted; None if it is."""
    found = {blob.media_type: blob.content for blob in blobs}
    signed = found.get(_STATEMENT_TYPE, b"")
    with tempfile.TemporaryDirectory(prefix="ftkit-") as folder:
        path, signature = Path(folder, "statement.json"), Path(folder, "signature")
        path.write_bytes(signed)
        signature.write_bytes(found.get(_SIGNATURE_TYPE, b""))
        try:
            verify(path, signature, key, SIGNED_AS)
            statement = parse_json(Statement, signed, "the statement")
        except (SignatureError, ImageError) as error:
            return error.what
    if statement != Statement(image=statement.image, digest=digest):
        return f"signs {statement.digest}, which is another image"
    if name is not None and statement.image != name.reference:
        return f"signs this image as {statement.image}"
    return None


def sign_file(file: Path, key: Path) -> Path:
    """Sign the manifest of an imported file, which has the file's digest; return the path of the signature.

    Raises:
        PrerequisiteError: ssh-keygen is missing, or refused the key.
    """
    return sign(manifest_file(file.resolve()), key, SIGNED_AS)


def require_beside(file: Path, key: Path) -> None:
    """Refuse an imported file whose manifest is not signed.

    `ftkit.images.verify` checks that the file matches its manifest.

    Raises:
        ImageError: there is no signature, or it does not match.
        PrerequisiteError: the key can't be read, or ssh-keygen is missing.
    """
    try:
        verify_beside(manifest_file(file.resolve()), key, SIGNED_AS)
    except (NotFoundError, SignatureError) as error:
        raise ImageError(error.what, meaning=error.meaning, fix=error.fix) from error
