"""Manifests and blobs of a registry, each compared with the digest that refers to it.

The chain is: reference -> index -> manifest -> configuration and layers. Its last link, from the layers to the
configuration's `diff_ids`, is checked where layers are unpacked (`flatten`).
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from ftkit.config.image_reference import Digest, RegistryImage
from ftkit.errors import NotFoundError, plural
from ftkit.images.events import Report, retry
from ftkit.images.oci.connection import Connection
from ftkit.images.oci.documents import Configuration, Descriptor, Index, Manifest, parse_json, read_document, untrusted

if TYPE_CHECKING:
    import requests

    from ftkit.images.oci.connection import Credentials


_MEDIA_TYPES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_MAX_MANIFEST: Final = 4 << 20
"""Bytes of a manifest or an index: the size that, by the OCI distribution specification, registries should support."""
_MAX_CONFIGURATION: Final = 16 << 20
_MAX_NESTED: Final = 3
_PARTIAL: Final = 206


class Registry:
    """The repository of one image; `waits`: seconds before each retry of a transient failure."""

    def __init__(
        self,
        reference: RegistryImage,
        credentials: Credentials | None,
        report: Report,
        waits: Sequence[float] | None = None,
    ) -> None:
        self._reference = reference
        self._report = report
        self.stage = f"downloading {reference}"  # for progress reports
        self._waits = waits
        self._connection = Connection(reference, credentials)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.session.close()

    def resolve(self) -> Digest:
        """Return the digest of the reference: that of the index, if the image has several architectures."""
        return self._document(self._reference.wanted, self._reference.digest)[1]

    def manifest(self) -> tuple[Manifest, tuple[Digest, ...]]:
        """Return the manifest for this machine's architecture, and the digests that lead to it, its own last."""
        document, digest = self._document(self._reference.wanted, self._reference.digest)
        digests = [digest]
        for _ in range(_MAX_NESTED):
            if isinstance(document, Manifest):
                return document, tuple(digests)
            entry = entry_for_this_machine(document, self._reference)
            document, digest = self._document(entry.digest, entry.digest, entry.size)
            digests.append(digest)
        raise untrusted(f"{self._reference} is an index of indexes that leads to no image")

    def _document(
        self, wanted: str, digest: Digest | None, size: int = _MAX_MANIFEST
    ) -> tuple[Index | Manifest, Digest]:
        body = self.document(f"manifests/{wanted}", digest, min(size, _MAX_MANIFEST))
        return read_document(body, str(self._reference)), Digest(f"sha256:{hashlib.sha256(body).hexdigest()}")

    def configuration(self, manifest: Manifest, *, is_for_nodes: bool = False) -> Configuration:
        """Return an image's configuration; refuse another platform, which only compute nodes may have."""
        wanted = manifest.config
        data = self.document(f"blobs/{wanted.digest}", wanted.digest, min(wanted.size, _MAX_CONFIGURATION))
        configuration = parse_json(Configuration, data, f"{self._reference} has a configuration that")
        if len(configuration.diff_ids) != len(manifest.layers):
            num_layers = plural(len(manifest.layers), "layer")
            what = f"its manifest has {num_layers}, its configuration {len(configuration.diff_ids)}"
            raise untrusted(f"{self._reference} is not one image: {what}")
        own = _platform_of_this_machine()
        found = (configuration.os or own[0], configuration.architecture or own[1])  # tools may leave them out
        if found != own and not is_for_nodes:
            raise _no_image(self._reference, [found])
        return configuration

    def document(self, path: str, digest: Digest | None = None, limit: int = _MAX_MANIFEST) -> bytes:
        """Return a document (`manifests/…`, `blobs/…`) of at most `limit` bytes; NotFoundError if there is none."""
        headers = {"Accept": ", ".join(_MEDIA_TYPES)} if path.startswith("manifests/") else {}

        def fetch() -> bytes:
            with self._connection.open(path, headers, has_digest=digest is not None) as response:
                return self._connection.read(response, limit)

        data = retry(fetch, self._report, self.stage, self._waits)
        if digest is not None:
            self._compare(digest, hashlib.sha256(data).hexdigest())
        return data

    def send(self, method: str, address: str, content: bytes, media_type: str) -> Mapping[str, str]:
        """Write to a path or an upload's address, and return the response's headers, by names in any case."""
        return retry(
            lambda: self._connection.send(method, address, content, media_type),
            self._report, f"writing to {self._reference.host}", self._waits,
        )  # fmt: skip

    def download(self, layer: Descriptor, path: Path, advance: Callable[[int], None]) -> None:
        """Download a layer into `path`; continue after a lost connection; never write more than the layer's size."""
        running = hashlib.sha256()

        def attempt() -> None:
            nonlocal running
            start = path.stat().st_size if path.exists() else 0
            if start and start == layer.size:
                return
            headers = {"Range": f"bytes={start}-"} if start else {}
            with (
                self._connection.open(f"blobs/{layer.digest}", headers, has_digest=True) as response,
                path.open("ab") as file,
            ):
                if not _starts_at(response, start):
                    file.truncate(0)
                    start, running = 0, hashlib.sha256()
                for chunk in self._connection.chunks(response):
                    start += len(chunk)
                    if start > layer.size:
                        what = f"sent more than the {layer.size} bytes of {layer.digest}"
                        raise self._connection.protocol_error(what)
                    file.write(chunk)
                    file.flush()
                    running.update(chunk)
                    advance(len(chunk))
            if start < layer.size:
                raise self._connection.connection_lost(f"{start} of {layer.size} bytes were received")

        retry(attempt, self._report, self.stage, self._waits)
        self._compare(layer.digest, running.hexdigest())

    def _compare(self, digest: Digest, found: str) -> None:
        if digest.hex != found:
            raise untrusted(f"{self._reference.host} sent other content than {digest} of {self._reference.path}")


def entry_for_this_machine(index: Index, reference: RegistryImage) -> Descriptor:
    """Return the entry of an index with this machine's platform, else one without a platform, which is optional."""
    found: dict[tuple[str, str] | None, Descriptor] = {}
    for each in sorted(index.manifests, key=_may_need_newer_processor):
        found.setdefault((each.platform.os, each.platform.architecture) if each.platform else None, each)
    if entry := found.get(_platform_of_this_machine()) or found.get(None):
        return entry
    raise _no_image(reference, [each for each in found if each not in (None, ("unknown", "unknown"))])  # attestations


def _may_need_newer_processor(entry: Descriptor) -> bool:
    """Return whether a variant is not the one that every amd64 or arm64 processor runs."""
    return entry.platform is not None and entry.platform.variant not in (None, "", "v1", "v8")


def _platform_of_this_machine() -> tuple[str, str]:
    machine = platform.machine()
    return "linux", {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def _no_image(reference: RegistryImage, others: Iterable[tuple[str, str]]) -> NotFoundError:
    own, built_for = "/".join(_platform_of_this_machine()), ", ".join(map("/".join, others))
    return NotFoundError(
        f"{reference} has no image for {own}",
        meaning=f"it was built for {built_for}" if built_for else "",
        fix="build it for this architecture, or import it on a machine of its own (ftkit import --on-node)",
    )


def _starts_at(response: requests.Response, start: int) -> bool:
    """Without a Content-Range, a partial response is assumed to start at `start`, and any other one at 0."""
    content_range = re.match(r"bytes (\d{1,18})-", response.headers.get("Content-Range", ""))
    if response.status_code != _PARTIAL:
        return start == 0
    return int(content_range[1]) == start if content_range else start > 0
