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
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict

from ftkit.config.image_reference import Digest, NamedImage
from ftkit.errors import ImageError, NotFoundError
from ftkit.images.image_store import manifest_file
from ftkit.images.oci.documents import INDEX_TYPE, MANIFEST_TYPE, Descriptor, DocumentKind, Index, Manifest, parse_json
from ftkit.runs.signing import Purpose, SignatureError, sign, verify, verify_beside

if TYPE_CHECKING:
    from ftkit.images.oci.registry import Registry

SIGNED_AS: Final[Purpose] = "ftkit-image"
_ARTIFACT_TYPE: Final = "application/vnd.ftkit.image-signature.v1"
_STATEMENT_TYPE: Final = "application/vnd.ftkit.image-statement.v1+json"
_SIGNATURE_TYPE: Final = "application/vnd.ftkit.signature.ssh"
_EMPTY_TYPE: Final = "application/vnd.oci.empty.v1+json"
_MAX_BLOB: Final = 1 << 20
_MAX_ARTIFACTS: Final = 200


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
    """Sign an image under the name that it was pushed with; return the digest of the artifact with the signature."""
    statement = Statement(image=image.reference, digest=digest).to_bytes()
    with tempfile.TemporaryDirectory(prefix="ftkit-") as folder:
        path = Path(folder, "statement.json")
        path.write_bytes(statement)
        signature = sign(path, key, SIGNED_AS).read_bytes()
    subject = registry.document(f"manifests/{digest}", digest)
    media_type = parse_json(DocumentKind, subject, f"{digest} has a manifest that").media_type
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": _ARTIFACT_TYPE,
        "config": _upload(registry, _EMPTY_TYPE, b"{}"),
        "layers": [_upload(registry, _STATEMENT_TYPE, statement), _upload(registry, _SIGNATURE_TYPE, signature)],
        "subject": _describe(media_type, subject),
    }
    content = json.dumps(manifest, separators=(",", ":")).encode()
    entry = _describe(MANIFEST_TYPE, content)
    headers = registry.send("PUT", f"manifests/{entry['digest']}", content, MANIFEST_TYPE)
    if "oci-subject" not in headers:  # the registry has no referrers API
        listed = [
            each.model_dump(by_alias=True, exclude_unset=True)
            for each in _artifacts(registry, digest, _tag(digest))
            if each.digest != entry["digest"]
        ]
        index = {
            "schemaVersion": 2,
            "mediaType": INDEX_TYPE,
            "manifests": [*listed, {**entry, "artifactType": _ARTIFACT_TYPE}],
        }
        registry.send("PUT", _tag(digest), json.dumps(index, separators=(",", ":")).encode(), INDEX_TYPE)
    return Digest(entry["digest"])


def require_in_registry(registry: Registry, name: NamedImage | None, digests: Sequence[Digest], key: Path) -> None:
    """Refuse an image unless one of `digests` (its index and manifest) is signed with `key`, under `name` if given."""
    refused = list[str]()
    for digest in digests:
        for each in _artifacts(registry, digest, f"referrers/{digest}", _tag(digest)):
            if each.media_type != MANIFEST_TYPE or each.artifact_type not in ("", _ARTIFACT_TYPE):
                continue
            body = registry.document(f"manifests/{each.digest}", each.digest)
            artifact = parse_json(Manifest, body, f"the artifact {each.digest} has a manifest that")
            if artifact.artifact_type == _ARTIFACT_TYPE:
                reason = _reason_to_refuse(registry, artifact, name, digest, key)
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
            name="image-not-signed",
        )
    raise ImageError(
        "\n    ".join((f"no signature of {image} matches {key}:", *refused)),
        meaning="somebody else signed it, or the image or its signature was changed",
        fix="don't use it before you know who pushed it; or give the right public key",
        name="image-signature-refused",
    )


def _reason_to_refuse(
    registry: Registry, artifact: Manifest, name: NamedImage | None, digest: Digest, key: Path
) -> str | None:
    files = {}
    for layer in artifact.layers[:2]:
        if layer.size > _MAX_BLOB:
            raise ImageError(f"the artifact's file {layer.digest} has {layer.size} bytes: it is not a signature")
        files[layer.media_type] = registry.document(f"blobs/{layer.digest}", layer.digest, layer.size)
    signed = files.get(_STATEMENT_TYPE, b"")
    with tempfile.TemporaryDirectory(prefix="ftkit-") as folder:
        path, signature = Path(folder, "statement.json"), Path(folder, "signature")
        path.write_bytes(signed)
        signature.write_bytes(files.get(_SIGNATURE_TYPE, b""))
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
    """Sign the manifest of an imported file, which has the file's digest; return the path of the signature."""
    return sign(manifest_file(file.resolve()), key, SIGNED_AS)


def require_beside(file: Path, key: Path) -> None:
    """Refuse a file whose manifest is not signed; `verify` checks that the file matches it."""
    try:
        verify_beside(manifest_file(file.resolve()), key, SIGNED_AS)
    except (NotFoundError, SignatureError) as error:
        raise ImageError(error.what, meaning=error.meaning, fix=error.fix) from error


class _Description(TypedDict):
    mediaType: str
    digest: str
    size: int


def _describe(media_type: str, content: bytes) -> _Description:
    return {"mediaType": media_type, "digest": f"sha256:{hashlib.sha256(content).hexdigest()}", "size": len(content)}


def _artifacts(registry: Registry, subject: Digest, *paths: str) -> tuple[Descriptor, ...]:
    """Return the artifacts of an image, from the first document that exists."""
    for path in paths:
        try:
            body = registry.document(path)
        except NotFoundError:
            continue
        return parse_json(Index, body, f"the list of artifacts of {subject}").manifests[:_MAX_ARTIFACTS]
    return ()


def _upload(registry: Registry, media_type: str, content: bytes) -> _Description:
    described = _describe(media_type, content)
    location = registry.send("POST", "blobs/uploads/", b"", "application/octet-stream").get("location")
    if not location:
        what = "the registry accepts no uploads: it returned no address for one"
        raise ImageError(what, fix="see the registry's log")
    separator = "&" if "?" in location else "?"
    address = f"{location}{separator}digest={quote(described['digest'])}"
    registry.send("PUT", address, content, "application/octet-stream")
    return described


def _tag(subject: Digest) -> str:
    """Return the path of the index that lists an image's artifacts, in a registry without the referrers API."""
    return f"manifests/{subject.file_name}"
