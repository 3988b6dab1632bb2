"""Small artifacts that refer to an image in a registry, as the OCI distribution specification 1.1 stores them.

An artifact is a manifest whose `subject` is the image's manifest or index. In a registry without the referrers API, the
client lists the artifacts of an image in an index with the tag `sha256-HEX`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field

from ftkit.config.image_reference import Digest
from ftkit.errors import ImageError, NotFoundError
from ftkit.images.oci.documents import Size, parse_json

if TYPE_CHECKING:
    from ftkit.images.oci.registry import Registry

MANIFEST_TYPE: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE: Final = "application/vnd.oci.image.index.v1+json"
_EMPTY_TYPE: Final = "application/vnd.oci.empty.v1+json"
_EMPTY: Final = b"{}"
_MAX_BLOB: Final = 1 << 20
_MAX_ARTIFACTS: Final = 200
_MAX_FILES: Final = 16
"""Maximum number of files of one artifact; a signature has two."""


@dataclass(frozen=True)
class Blob:
    """A file of an artifact."""

    media_type: str
    content: bytes


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


class _Reference(_Document):
    digest: Digest
    size: Size
    media_type: str = Field(default=MANIFEST_TYPE, alias="mediaType")
    artifact_type: str = Field(default="", alias="artifactType")


class _Artifact(_Document):
    layers: tuple[_Reference, ...] = Field(default=(), max_length=_MAX_FILES)


class _Listing(_Document):
    manifests: tuple[_Reference, ...] = Field(default=(), max_length=_MAX_ARTIFACTS)


class _Index(_Document):
    """The same list, with all fields of its entries, which are written back unchanged."""

    manifests: tuple[dict[str, Any], ...] = Field(default=(), max_length=_MAX_ARTIFACTS)


class _Typed(_Document):
    media_type: str = Field(default=MANIFEST_TYPE, alias="mediaType")
    artifact_type: str = Field(default="", alias="artifactType")


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
    media_type = parse_json(_Typed, image, f"{subject} has a manifest that").media_type
    manifest = _to_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": artifact_type,
            "config": _upload(registry, Blob(_EMPTY_TYPE, _EMPTY)),
            "layers": [_upload(registry, blob) for blob in blobs],
            "subject": _descriptor(media_type, image),
        }
    )
    entry = _descriptor(MANIFEST_TYPE, manifest) | {"artifactType": artifact_type}
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
    for each in _listing(registry, subject).manifests:
        if each.media_type != MANIFEST_TYPE or each.artifact_type not in ("", artifact_type):
            continue
        body = registry.document(f"manifests/{each.digest}", each.digest)
        if parse_json(_Typed, body, f"the artifact {each.digest} has a manifest that").artifact_type == artifact_type:
            artifact = parse_json(_Artifact, body, f"the artifact {each.digest} has a manifest that")
            found.append(tuple(_download(registry, layer) for layer in artifact.layers))
    return found


def _listing(registry: Registry, subject: Digest) -> _Listing:
    for path in (f"referrers/{subject}", f"manifests/{_tag(subject)}"):
        try:
            body = registry.document(path)
        except NotFoundError:
            continue
        return parse_json(_Listing, body, f"the list of artifacts of {subject}")
    return _Listing()


def _list_under_tag(registry: Registry, subject: Digest, entry: dict[str, Any]) -> None:
    """Add an artifact to the index that lists those of an image."""
    try:
        body = registry.document(f"manifests/{_tag(subject)}")
        index = parse_json(_Index, body, f"the list of artifacts of {subject}")
        listed = [each for each in index.manifests if each.get("digest") != entry["digest"]]
    except NotFoundError:
        listed = []
    content = _to_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [*listed, entry]})
    registry.send("PUT", f"manifests/{_tag(subject)}", content, INDEX_TYPE)


def _upload(registry: Registry, blob: Blob) -> dict[str, Any]:
    """Store a file, and return its descriptor."""
    descriptor = _descriptor(blob.media_type, blob.content)
    location = registry.send("POST", "blobs/uploads/", b"", "application/octet-stream").get("location")
    if not location:
        raise ImageError(
            "the registry accepts no uploads: it returned no address for one", fix="see the registry's log"
        )
    separator = "&" if "?" in location else "?"
    address = f"{location}{separator}digest={quote(descriptor['digest'])}"
    registry.send("PUT", address, blob.content, "application/octet-stream")
    return descriptor


def _download(registry: Registry, layer: _Reference) -> Blob:
    if layer.size > _MAX_BLOB:
        raise ImageError(f"the artifact's file {layer.digest} has {layer.size} bytes: it is not a signature")
    return Blob(layer.media_type, registry.document(f"blobs/{layer.digest}", layer.digest, layer.size))


def _descriptor(media_type: str, content: bytes) -> dict[str, Any]:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    return {"mediaType": media_type, "digest": digest, "size": len(content)}


def _tag(subject: Digest) -> str:
    return subject.replace(":", "-")


def _to_json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
