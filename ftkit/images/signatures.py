"""Signatures of images: next to the image in a registry, and next to imported files.

In a registry, a short statement is signed, `NAME:TAG has this digest`, so that a signed image can't be passed off as
another one. Statement and signature are an artifact that refers to the image, as the OCI distribution specification 1.1
says: a manifest whose `subject` is the image's manifest or index. In a registry without the referrers API, the client
lists the artifacts of an image in an index with the tag `sha256-HEX`.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field

from ftkit.config.image_reference import Digest
from ftkit.errors import ImageError, NotFoundError
from ftkit.images.oci.documents import Size, parse_json
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
MANIFEST_TYPE: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE: Final = "application/vnd.oci.image.index.v1+json"
_EMPTY_TYPE: Final = "application/vnd.oci.empty.v1+json"
_MAX_BLOB: Final = 1 << 20
_MAX_ARTIFACTS: Final = 200
_MAX_FILES: Final = 16
"""Maximum number of files of one artifact; a signature has two."""


class Statement(BaseModel):
    """The signed statement: the image `NAME:TAG` has this digest of its manifest or index."""

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


@dataclass(frozen=True)
class Blob:
    """A file of an artifact."""

    media_type: str
    content: bytes


class _Descriptor(BaseModel):
    """A reference to a manifest or blob; other fields are kept, and written back unchanged."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)

    digest: Digest
    size: Size
    media_type: str = Field(default=MANIFEST_TYPE, alias="mediaType")
    artifact_type: str = Field(default="", alias="artifactType")


class _Document(BaseModel):
    """An index, which lists the artifacts of an image, or the manifest of an image or artifact."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    media_type: str = Field(default=MANIFEST_TYPE, alias="mediaType")
    artifact_type: str = Field(default="", alias="artifactType")
    manifests: tuple[_Descriptor, ...] = Field(default=(), max_length=_MAX_ARTIFACTS)
    layers: tuple[_Descriptor, ...] = ()


def attach(registry: Registry, subject: Digest, artifact_type: str, blobs: tuple[Blob, ...]) -> Digest:
    """Store files as an artifact that refers to an image, and return the artifact's digest.

    Args:
        registry: the image's repository.
        subject: digest of the image's manifest or index.
        artifact_type: the artifact's media type.
        blobs: the files.

    Raises:
        ImageError: the registry refuses it, or can't be reached after several attempts.
    """
    image = registry.document(f"manifests/{subject}", subject)
    media_type = parse_json(_Document, image, f"{subject} has a manifest that").media_type
    manifest = _to_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": artifact_type,
            "config": _upload(registry, Blob(_EMPTY_TYPE, b"{}")),
            "layers": [_upload(registry, blob) for blob in blobs],
            "subject": _describe(media_type, image),
        }
    )
    entry = _describe(MANIFEST_TYPE, manifest) | {"artifactType": artifact_type}
    headers = registry.send("PUT", f"manifests/{entry['digest']}", manifest, MANIFEST_TYPE)
    if "oci-subject" not in headers:
        _list_under_tag(registry, subject, entry)
    return Digest(entry["digest"])


def attached(registry: Registry, subject: Digest, artifact_type: str) -> list[tuple[Blob, ...]]:
    """Return the files of each artifact of one type that refers to an image.

    Raises:
        ImageError: access is denied, or a document can't be read or does not have its digest.
    """
    found = []
    for each in _listed(registry, subject, f"referrers/{subject}", _tag(subject)):
        if each.media_type != MANIFEST_TYPE or each.artifact_type not in ("", artifact_type):
            continue
        body = registry.document(f"manifests/{each.digest}", each.digest)
        artifact = parse_json(_Document, body, f"the artifact {each.digest} has a manifest that")
        if artifact.artifact_type == artifact_type:
            found.append(tuple(_download(registry, layer) for layer in artifact.layers[:_MAX_FILES]))
    return found


def _listed(registry: Registry, subject: Digest, *paths: str) -> tuple[_Descriptor, ...]:
    """Return the artifacts of an image, from the first document that exists."""
    for path in paths:
        try:
            body = registry.document(path)
        except NotFoundError:
            continue
        return parse_json(_Document, body, f"the list of artifacts of {subject}").manifests
    return ()


def _list_under_tag(registry: Registry, subject: Digest, entry: dict[str, Any]) -> None:
    """Add an artifact to the index that lists those of an image."""
    listed = [
        each.model_dump(by_alias=True, exclude_unset=True)
        for each in _listed(registry, subject, _tag(subject))
        if each.digest != entry["digest"]
    ]
    content = _to_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [*listed, entry]})
    registry.send("PUT", _tag(subject), content, INDEX_TYPE)


def _upload(registry: Registry, blob: Blob) -> dict[str, Any]:
    """Store a file, and return its descriptor."""
    descriptor = _describe(blob.media_type, blob.content)
    location = registry.send("POST", "blobs/uploads/", b"", "application/octet-stream").get("location")
    if not location:
        raise ImageError(
            "the registry accepts no uploads: it returned no address for one", fix="see the registry's log"
        )
    separator = "&" if "?" in location else "?"
    address = f"{location}{separator}digest={quote(descriptor['digest'])}"
    registry.send("PUT", address, blob.content, "application/octet-stream")
    return descriptor


def _download(registry: Registry, layer: _Descriptor) -> Blob:
    if layer.size > _MAX_BLOB:
        raise ImageError(f"the artifact's file {layer.digest} has {layer.size} bytes: it is not a signature")
    return Blob(layer.media_type, registry.document(f"blobs/{layer.digest}", layer.digest, layer.size))


def _describe(media_type: str, content: bytes) -> dict[str, Any]:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    return {"mediaType": media_type, "digest": digest, "size": len(content)}


def _tag(subject: Digest) -> str:
    """Return the path of the index that lists an image's artifacts, in a registry without the referrers API."""
    return f"manifests/{subject.replace(':', '-')}"


def _to_json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
