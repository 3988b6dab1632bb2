"""Signatures in a registry are valid for one image under one name, with and without the referrers API."""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast
from urllib.parse import parse_qs, urlsplit

import pytest

from ftkit.config.image_reference import Digest, NamedImage
from ftkit.errors import ImageError, NotFoundError
from ftkit.images.oci.documents import INDEX_TYPE, MANIFEST_TYPE
from ftkit.images.signatures import require_in_registry, sign_in_registry

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.images.oci.registry import Registry

TINY = NamedImage("tiny:1")


def digest_of(content: bytes) -> Digest:
    return Digest(f"sha256:{hashlib.sha256(content).hexdigest()}")


@dataclass
class StandIn:
    """An in-memory registry."""

    has_referrers: bool
    stored: dict[str, bytes] = field(default_factory=dict)

    def push(self, content: str) -> Digest:
        image = json.dumps({"mediaType": MANIFEST_TYPE, "config": content, "layers": []}).encode()
        self.stored[f"manifests/{digest_of(image)}"] = image
        return digest_of(image)

    def document(self, path: str, digest: Digest | None = None, limit: int = 1 << 20) -> bytes:
        if self.has_referrers and path.startswith("referrers/"):
            return self._referrers(path.removeprefix("referrers/"))
        if path not in self.stored:
            raise NotFoundError(f"no {path}")
        found = self.stored[path]
        assert len(found) <= limit
        assert digest in (None, digest_of(found))
        return found

    def _referrers(self, subject: str) -> bytes:
        found = []
        for content in self.stored.values():
            manifest = json.loads(content) if content.startswith(b"{") else {}
            if manifest.get("subject", {}).get("digest") == subject:
                entry = {"mediaType": MANIFEST_TYPE, "digest": digest_of(content), "size": len(content)}
                found.append({**entry, "artifactType": manifest["artifactType"]})
        return json.dumps({"mediaType": INDEX_TYPE, "manifests": found}).encode()

    def send(self, method: str, address: str, content: bytes, media_type: str) -> dict[str, str]:
        if method == "POST":
            return {"location": "/v2/x/blobs/uploads/1?state=a"}
        asked = parse_qs(urlsplit(address).query)
        if "digest" in asked:
            assert asked["state"] == ["a"]
            assert asked["digest"] == [digest_of(content)]
            self.stored[f"blobs/{digest_of(content)}"] = content
            return {}
        assert json.loads(content)["mediaType"] == media_type
        self.stored[address] = content
        return {"oci-subject": "x"} if self.has_referrers else {}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the SSH keys `ours` and `theirs`."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ours", "theirs"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name]
        subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("has_referrers", [True, False])
def test_a_signature_is_valid_only_for_its_image_name_and_key(keys: Path, has_referrers: bool) -> None:
    stand_in = StandIn(has_referrers)
    registry, image, other = cast("Registry", stand_in), stand_in.push("a"), stand_in.push("b")

    def require(name: NamedImage | None, *digests: Digest, key: str = "ours.pub") -> None:
        require_in_registry(registry, name, digests, keys / key)

    def refused(wanted: NamedImage, digest: Digest, name: str) -> None:
        with pytest.raises(ImageError) as caught:
            require(wanted, digest)
        assert caught.value.name == name

    refused(TINY, image, name="image-not-signed")
    sign_in_registry(registry, TINY, image, keys / "theirs")
    refused(TINY, image, name="image-signature-refused")
    sign_in_registry(registry, TINY, image, keys / "ours")
    require(TINY, image)
    require(TINY, image, key="theirs.pub")
    require(TINY, digest_of(b"an index that leads to it"), image)
    require(None, image)
    refused(TINY, other, name="image-not-signed")
    refused(NamedImage("tiny:2"), image, name="image-signature-refused")


def test_a_signature_of_another_image_is_rejected(keys: Path) -> None:
    stand_in = StandIn(has_referrers=False)
    registry, image, other = cast("Registry", stand_in), stand_in.push("a"), stand_in.push("b")
    sign_in_registry(registry, TINY, image, keys / "ours")
    tags = [f"manifests/{digest.replace(':', '-')}" for digest in (image, other)]
    stand_in.stored[tags[1]] = stand_in.stored[tags[0]]
    with pytest.raises(ImageError, match=image):
        require_in_registry(registry, TINY, [other], keys / "ours.pub")


def test_a_second_signature_is_listed_next_to_the_first(keys: Path) -> None:
    stand_in = StandIn(has_referrers=False)
    image = stand_in.push("a")
    tag = f"manifests/{image.replace(':', '-')}"
    for name in ("ours", "theirs", "ours"):
        sign_in_registry(cast("Registry", stand_in), TINY, image, keys / name)
    listed = [each["digest"] for each in json.loads(stand_in.stored[tag])["manifests"]]
    assert len(listed) == len(set(listed)) >= 2
    for name in ("ours.pub", "theirs.pub"):
        require_in_registry(cast("Registry", stand_in), TINY, [image], keys / name)
