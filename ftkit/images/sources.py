"""Where an image can be imported from."""

from __future__ import annotations

import shutil
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from threading import Event
from typing import TYPE_CHECKING, Final, Protocol

from ftkit.images import engine, enroot, squashfs
from ftkit.images.oci.documents import RunConfig
from ftkit.images.oci.flatten import Layer, flatten
from ftkit.images.oci.rootfs import SBOM_PATH, Contents, Entry, ImageConfig
from ftkit.images.oci.tar import TarReader
from ftkit.images.packing import ByteCounter, Made, pack_entries
from ftkit.images.progress import Progress
from ftkit.images.squashfs import disk_full

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftkit.config.digest import Digest
    from ftkit.config.image_reference import RegistryImage
    from ftkit.images.engine import EngineImage
    from ftkit.images.enroot import Address, ComputeNode
    from ftkit.images.oci.registry import Registry
    from ftkit.images.progress import Report
    from ftkit.images.store import Format

_DOWNLOADS_AT_ONCE: Final = 3


class ImageSource(Protocol):
    """An image that can be imported.

    `image_id` is the digest of its configuration: what it is, wherever it is, because the configuration lists its
    layers. `registry_digest` is that of its manifest in a registry; none: it is in none. `format` is that of the file
    that it makes. `is_vouched_for`: who has the image compared its layers with its configuration.
    """

    format: Format
    image_id: Digest
    is_vouched_for: bool
    config: ImageConfig

    @property
    def registry_digest(self) -> Digest | None:
        """Return the digest of its manifest."""

    def describe(self) -> str:
        """Say where the image comes from."""

    def make_file(self, partial: Path, report: Report) -> Made:
        """Make the file."""


class EngineSource:
    """An image in the docker engine, read from its export."""

    format: Format = "sqsh"
    is_vouched_for: bool = True

    def __init__(self, name: str, image: EngineImage) -> None:
        self.name = name
        self._image = image
        self.image_id = image.id
        self.config = image.config
        self.registry_digest = next((digest for _, digest in image.repo_digests), None)

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
    is_vouched_for: bool = False

    def __init__(self, reference: RegistryImage, registry: Registry) -> None:
        self._reference = reference
        self._registry = registry
        manifest, self.registry_digest = registry.manifest()
        self.image_id = manifest.config.digest
        self._layers = manifest.layers
        configuration = registry.configuration(manifest)
        self._diff_ids = configuration.rootfs.diff_ids
        self.config = engine.image_config(configuration.config or RunConfig(), configuration.created)

    def describe(self) -> str:
        """Say where the image comes from."""
        return f"registry, {self._reference}"

    def enroot_address(self) -> Address:
        """Return what enroot calls exactly this image."""
        layers = zip((layer.digest for layer in self._layers), self._diff_ids, strict=True)
        return enroot.address_in_registry(self._reference, self.registry_digest, self.image_id, layers)

    def make_file(self, partial: Path, report: Report) -> Made:
        """Download the layers, as they are, and pack what they make together.

        Raises:
            ImageError: a layer is not what the manifest or the configuration says.
        """
        folder = partial.with_name(f"{partial.name}.layers")
        folder.mkdir(mode=0o700)
        try:
            blobs = self._download(folder, report)
            return pack_entries(flatten(blobs), self.config, partial, root_bytes=None, report=report)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            self._registry.close()

    def _download(self, folder: Path, report: Report) -> list[Layer]:
        """Download every layer once, a few at a time; return them in the manifest's order, the lowest first.

        When one fails, or the user has had enough, the others stop at their next piece.
        """
        different = {layer.digest: layer for layer in self._layers}
        num_bytes = sum(layer.size for layer in different.values())
        if num_bytes > shutil.disk_usage(folder).free:
            raise disk_full(folder.parent)
        counter = ByteCounter(report, self._registry.stage, num_bytes)
        paths = {digest: folder / digest.file_name for digest in different}
        is_over = Event()

        def advance(num_bytes: int) -> None:
            if is_over.is_set():
                raise CancelledError
            counter.advance(num_bytes)

        with ThreadPoolExecutor(_DOWNLOADS_AT_ONCE) as pool:
            jobs = [
                pool.submit(self._registry.download, layer, paths[digest], advance)
                for digest, layer in different.items()
            ]
            try:
                for job in as_completed(jobs):
                    job.result()
            except BaseException:
                is_over.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        both = zip(self._layers, self._diff_ids, strict=True)
        return [Layer(paths[layer.digest], diff_id) for layer, diff_id in both]


class EnrootSource:
    """An image that enroot imports; `known` knows what it is."""

    format: Format = "sqsh"

    def __init__(self, known: EngineSource | RegistrySource, node: ComputeNode | None = None) -> None:
        self._address = known.enroot_address()
        self._node = node
        self.image_id = known.image_id
        self.registry_digest = known.registry_digest
        self.is_vouched_for = known.is_vouched_for
        self.config = known.config

    def describe(self) -> str:
        """Say where the image comes from."""
        return f"enroot, {self._address.uri}"

    def make_file(self, partial: Path, report: Report) -> Made:
        """Let enroot make the file."""
        report(Progress(f"enroot imports {self._address.uri}"))
        enroot.import_to(partial, self._address, self._node)
        return Made(Contents(sbom=squashfs.read_file(partial, SBOM_PATH)), f"enroot, {squashfs.ENROOT_OPTIONS}")
