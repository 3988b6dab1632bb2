"""Where an image can be imported from."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from threading import Event
from typing import TYPE_CHECKING, Final, Protocol

from ftkit.images import engine, enroot, squashfs
from ftkit.images.flatten import flatten
from ftkit.images.packing import ByteCounter, Made, pack_entries
from ftkit.images.progress import Progress
from ftkit.images.root_filesystem import SBOM_PATH, Contents, Entry, ImageConfig
from ftkit.images.tar_members import TarReader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftkit.images.engine import EngineImage
    from ftkit.images.enroot import Address, ComputeNode
    from ftkit.images.progress import Report
    from ftkit.images.registry import Registry
    from ftkit.images.store import Format
    from ftkit.specs.image_reference import RegistryImage

_DOWNLOADS_AT_ONCE: Final = 3


class ImageSource(Protocol):
    """An image that can be imported.

    `image_id` is the digest of its configuration: what it is, wherever it lies. `registry_digest` is that of its
    manifest in a registry, empty if it has none. `format` is that of the file that it makes.
    """

    format: Format
    image_id: str
    registry_digest: str
    config: ImageConfig

    def describe(self) -> str:
        """Say where the image comes from."""

    def make_file(self, partial: Path, report: Report) -> Made:
        """Make the file."""


class EngineSource:
    """An image in the docker engine, read from its export."""

    format: Format = "sqsh"

    def __init__(self, name: str, image: EngineImage) -> None:
        self.name = name
        self._image = image
        self.image_id = image.id
        self.config = image.config
        self.registry_digest = image.repo_digests[0].partition("@")[2] if image.repo_digests else ""

    def describe(self) -> str:
        """Say where the image comes from."""
        return f"docker engine, {self.name}"

    def enroot_address(self) -> Address:
        """Return what enroot calls exactly this image."""
        return enroot.address_in_engine(self.image_id)

    def make_file(self, partial: Path, report: Report) -> Made:
        """Export the image and pack it on the way."""
        with engine.connected() as client, engine.exported(client, self._image.id) as stream:
            entries = members_of(TarReader(stream))
            return pack_entries(entries, self.config, partial, root_bytes=self._image.size or None, report=report)


def members_of(reader: TarReader) -> Iterator[Entry]:
    """Yield each member with its content."""
    for member in reader:
        yield member, reader.content()


class RegistrySource:
    """An image in a registry, read from its layers."""

    format: Format = "sqsh"

    def __init__(self, reference: RegistryImage, registry: Registry) -> None:
        self._reference = reference
        self._registry = registry
        manifest, self.registry_digest = registry.manifest(reference.wanted)
        self.image_id = str(manifest["config"]["digest"])
        self._layers = [(str(layer["digest"]), int(layer["size"])) for layer in manifest["layers"]]
        described = json.loads(registry.blob_bytes(self.image_id))
        self.config = engine.read_config(described.get("config") or {}, described.get("created"))

    def describe(self) -> str:
        """Say where the image comes from."""
        return f"registry, {self._reference}"

    def enroot_address(self) -> Address:
        """Return what enroot calls exactly this image."""
        return enroot.address_in_registry(self._reference, self.registry_digest, self.image_id)

    def make_file(self, partial: Path, report: Report) -> Made:
        """Download the layers, as they are, and pack what they make together."""
        folder = partial.with_name(f"{partial.name}.layers")
        folder.mkdir()
        try:
            blobs = self._download(folder, report)
            return pack_entries(flatten(blobs), self.config, partial, root_bytes=None, report=report)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            self._registry.close()

    def _download(self, folder: Path, report: Report) -> list[Path]:
        """Download every layer once, a few at a time; return them in the manifest's order, the lowest first.

        When one fails, or the user has had enough, the others stop at their next piece.
        """
        sizes = dict(self._layers)
        counter = ByteCounter(report, self._registry.stage, sum(sizes.values()))
        paths = {digest: folder / digest.replace(":", "-") for digest in sizes}
        is_over = Event()

        def advance(num_bytes: int) -> None:
            if is_over.is_set():
                raise CancelledError
            counter.advance(num_bytes)

        with ThreadPoolExecutor(_DOWNLOADS_AT_ONCE) as pool:
            jobs = [pool.submit(self._registry.download, digest, path, advance) for digest, path in paths.items()]
            try:
                for job in as_completed(jobs):
                    job.result()
            except BaseException:
                is_over.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return [paths[digest] for digest, _ in self._layers]


class EnrootSource:
    """An image that enroot imports; `known` knows what it is."""

    format: Format = "sqsh"

    def __init__(self, known: EngineSource | RegistrySource, node: ComputeNode | None = None) -> None:
        self._address = known.enroot_address()
        self._node = node
        self.image_id = known.image_id
        self.registry_digest = known.registry_digest
        self.config = known.config

    def describe(self) -> str:
        """Say where the image comes from."""
        return f"enroot, {self._address.uri}"

    def make_file(self, partial: Path, report: Report) -> Made:
        """Let enroot make the file."""
        report(Progress(f"enroot imports {self._address.uri}"))
        enroot.import_to(partial, self._address, self._node)
        return Made(Contents(sbom=squashfs.read_file(partial, SBOM_PATH)), f"enroot, {squashfs.ENROOT_OPTIONS}")
