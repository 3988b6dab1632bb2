"""Import an image, from the docker engine or a registry, into one file on the shared file system."""

from __future__ import annotations

import errno
import shutil
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Final, Literal, Protocol

from ftkit import __version__
from ftkit.config.cluster import ClusterProfile
from ftkit.config.image_reference import DockerdImage, ImportableImage, NamedImage, RegistryImage
from ftkit.errors import ConfigError, NotFoundError, PrerequisiteError, Problem
from ftkit.images import docker_engine, enroot, squashfs
from ftkit.images.oci.access import find_credentials
from ftkit.images.oci.documents import RunConfig
from ftkit.images.oci.flatten import Layer, flatten
from ftkit.images.oci.registry import Registry
from ftkit.images.oci.tar import TarReader
from ftkit.images.progress import ByteCounter, ProgressEvent, Report, ignore_progress
from ftkit.images.signatures import require_in_registry
from ftkit.images.squashfs import MadeFile, build_squashfs, disk_full
from ftkit.images.store import ImportManifest, sbom_file
from ftkit.images.verify import BLOCK_SIZE, digest_file, manifest_if_intact

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.config.image_reference import Digest, ImageFormat
    from ftkit.images.docker_engine import DockerImage
    from ftkit.images.enroot import Address
    from ftkit.images.progress import Report
    from ftkit.images.squashfs import Entry, ImageConfig
    from ftkit.images.store import ImageStore


_MAX_PARALLEL_DOWNLOADS: Final = 3


class ImageSource(Protocol):
    """An image that can be imported into a file of a format.

    `image_id` is the digest of its configuration, which lists the layers, and so identifies it everywhere. With
    `is_vouched_for`, the docker engine has compared the layers with the configuration already.
    """

    format: ImageFormat
    image_id: Digest
    is_vouched_for: bool
    config: ImageConfig

    @property
    def registry_digest(self) -> Digest | None:
        """Digest of its manifest in a registry; None if it is in none."""

    @property
    def origin(self) -> str:
        """Where the image comes from."""

    def make_file(self, partial: Path, report: Report) -> MadeFile:
        """Write the image's file."""


class DockerSource:
    """An image in the docker engine, read from its export."""

    format: ImageFormat = "sqsh"
    is_vouched_for: bool = True

    def __init__(self, name: str, image: DockerImage) -> None:
        self.name = name
        self._image = image
        self.image_id = image.id
        self.config = image.config
        self.registry_digest = next((digest for _, digest in image.repo_digests), None)

    @property
    def origin(self) -> str:
        """Where the image comes from."""
        return f"docker engine, {self.name}"

    def enroot_address(self) -> Address:
        """Return enroot's address of exactly this image."""
        return enroot.address_in_docker(self.image_id)

    def make_file(self, partial: Path, report: Report) -> MadeFile:
        """Export the image, and build the file from the stream."""
        with docker_engine.connect() as client, docker_engine.exported(client, self._image.id) as stream:
            entries = members_of(TarReader(stream))
            return build_squashfs(entries, self.config, partial, root_bytes=self._image.size or None, report=report)


def members_of(reader: TarReader) -> Iterator[Entry]:
    """Yield each member with its content."""
    for member in reader:
        yield member, reader.content()


class RegistrySource:
    """An image in a registry, read from its layers."""

    format: ImageFormat = "sqsh"
    is_vouched_for: bool = False

    def __init__(self, reference: RegistryImage, registry: Registry) -> None:
        self._reference = reference
        self._registry = registry
        manifest, self.digests = registry.manifest()
        self.registry_digest = self.digests[-1]
        self.image_id = manifest.config.digest
        self._layers = manifest.layers
        configuration = registry.configuration(manifest)
        self._diff_ids = configuration.rootfs.diff_ids
        self.config = docker_engine.image_config(configuration.config or RunConfig(), configuration.created)

    @property
    def origin(self) -> str:
        """Where the image comes from."""
        return f"registry, {self._reference}"

    def enroot_address(self) -> Address:
        """Return enroot's address of exactly this image."""
        layers = zip((layer.digest for layer in self._layers), self._diff_ids, strict=True)
        return enroot.address_in_registry(self._reference, self.registry_digest, self.image_id, layers)

    def make_file(self, partial: Path, report: Report) -> MadeFile:
        """Download the compressed layers, and build the file from their flattened content.

        Raises:
            ImageError: a layer differs from the manifest or the configuration.
        """
        folder = partial.with_name(f"{partial.name}.layers")
        folder.mkdir(mode=0o700)
        try:
            blobs = self._download(folder, report)
            return build_squashfs(flatten(blobs), self.config, partial, root_bytes=None, report=report)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            self._registry.close()

    def _download(self, folder: Path, report: Report) -> list[Layer]:
        """Download each distinct layer, a few in parallel; return all layers in the manifest's order, the lowest first.

        If a download fails, or the user interrupts, the others stop at their next chunk.
        """
        distinct = {layer.digest: layer for layer in self._layers}
        num_bytes = sum(layer.size for layer in distinct.values())
        if num_bytes > shutil.disk_usage(folder).free:
            raise disk_full(folder.parent)
        counter = ByteCounter(report, self._registry.stage, num_bytes)
        paths = {digest: folder / digest.file_name for digest in distinct}
        is_stopped = Event()

        def advance(num_bytes: int) -> None:
            if is_stopped.is_set():
                raise CancelledError
            counter.advance(num_bytes)

        with ThreadPoolExecutor(_MAX_PARALLEL_DOWNLOADS) as pool:
            jobs = [
                pool.submit(self._registry.download, layer, paths[digest], advance)
                for digest, layer in distinct.items()
            ]
            try:
                for job in as_completed(jobs):
                    job.result()
            except BaseException:
                is_stopped.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        both = zip(self._layers, self._diff_ids, strict=True)
        return [Layer(paths[layer.digest], diff_id) for layer, diff_id in both]


ImportMethod = Literal["auto", "enroot", "ftkit"]


@dataclass(frozen=True)
class ImportRequest:
    """A request to import an image.

    Args:
        image: the image.
        registry: the registry that has a `NAME:TAG` if the docker engine does not.
        cluster: the cluster to import for.
        on_node: import with enroot on a compute node.
        method: which program writes the file.
        public_key: the key that the image must be signed with; signatures are in registries.
    """

    image: ImportableImage
    registry: str | None
    cluster: ClusterProfile
    on_node: bool = False
    method: ImportMethod = "auto"
    public_key: Path | None = None

    @property
    def name(self) -> NamedImage:
        """The name that the image is imported under; for an address, its last part."""
        return self.image if isinstance(self.image, NamedImage) else self.image.named

    @property
    def registry_image(self) -> RegistryImage | None:
        """Where the image is in a registry; None if no registry is given."""
        if isinstance(self.image, NamedImage):
            return self.image.in_registry(self.registry) if self.registry else None
        return self.image if isinstance(self.image, RegistryImage) else None


def select_source(request: ImportRequest, report: Report) -> ImageSource:
    """Return the source to import from.

    Raises:
        NotFoundError: neither engine nor registry has the image.
        PrerequisiteError: a program or service that the request needs is missing.
    """
    if request.on_node:
        return _on_node(request, report)
    known = (None if request.public_key else _docker_source(request.image)) or _registry_source(request, report)
    uses_enroot = request.method == "auto" and enroot.is_installed() and squashfs.find_tool() is None
    return enroot.EnrootSource(known) if request.method == "enroot" or uses_enroot else known


def _on_node(request: ImportRequest, report: Report) -> enroot.EnrootSource:
    if request.cluster.scheduler != "slurm":
        raise ConfigError(
            [Problem(f"cluster {request.cluster.name}", "--on-node", "this cluster has no Slurm.",
                     "Leave --on-node out.")]
        )  # fmt: skip
    if request.registry_image is None:
        raise ConfigError(
            [Problem("", "--on-node", "a compute node can't reach this machine's docker engine.",
                     "Push the image, and give --registry or a docker:// address.")]
        )  # fmt: skip
    return enroot.EnrootSource(_registry_source(request, report), enroot.compute_node(request.cluster))


def _docker_source(image: ImportableImage) -> DockerSource | None:
    """Return the image in the docker engine; None if no engine responds, or it has no such image."""
    if isinstance(image, RegistryImage):
        return None
    is_required = isinstance(image, DockerdImage)
    try:
        with docker_engine.connect() as client:
            found = docker_engine.inspect(client, image.docker_name)
    except PrerequisiteError:
        if is_required:
            raise
        return None
    if found is None and is_required:
        raise NotFoundError(f"the docker engine has no image {image.docker_name}", fix="see 'docker images'")
    return DockerSource(image.docker_name, found) if found else None


def _registry_source(request: ImportRequest, report: Report) -> RegistrySource:
    remote = request.registry_image
    if remote is None and request.public_key:
        raise ConfigError(
            [Problem("", "--require-signature", "signatures of images are in registries, and no registry is given.",
                     f"Push it: ftkit push {request.name} --sign --key FILE --registry HOST/PATH")]
        )  # fmt: skip
    if remote is None:
        raise NotFoundError(
            f"{request.image} was not built on this machine, and no registry is given",
            meaning="no docker engine here has it, and neither --registry nor 'registry:' in ftkit.yaml is set",
            fix=f"ftkit build {request.image} here, or ftkit import {request.image} --registry HOST/PATH",
        )
    registry = Registry(remote, find_credentials(remote.host), report)
    source = RegistrySource(remote, registry)
    if request.public_key:
        require_in_registry(registry, None if remote.digest else request.name, source.digests, request.public_key)
    return source


@dataclass(frozen=True)
class ImportResult:
    """The result of an import."""

    file: Path
    link: Path
    manifest: ImportManifest
    is_new: bool


def import_image(
    reference: str,
    source: ImageSource,
    store: ImageStore,
    *,
    force: bool = False,
    report: Report = ignore_progress,
) -> ImportResult:
    """Import `source` as `NAME:TAG`, unless the same image is imported already.

    Raises:
        PrerequisiteError: the folder can't be written to, or a program is missing.
        ImageError: the source's data is truncated, or the disk is full.
    """
    final = store.file(source.image_id, source.format)
    found = None if force else _existing(reference, source, store)
    if found:
        return found
    store.prepare()
    with store.locked(final.name, lambda: report(ProgressEvent("waiting for another import of this image"))):
        found = None if force else _existing(reference, source, store)
        if found:
            return found
        with store.partial(final) as partial, _explain_full_disk(store.root):
            made = source.make_file(partial, report)
            # Some releases of Apptainer don't compare layers with the configuration: its file is always made again.
            layers_were_compared = source.format == "sqsh"
            if found := _under_new_manifest(reference, source, store) if layers_were_compared and not force else None:
                return found
            manifest = _make_manifest(reference, source, partial, final.name, made, report)
            store.publish(partial, manifest, made.contents.sbom)
    return ImportResult(final, store.link(reference, source.format), manifest, is_new=True)


@contextmanager
def _explain_full_disk(folder: Path) -> Iterator[None]:
    """Convert the system's error for a full disk to an `ImageError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(folder) from error
        raise


def _existing(reference: str, source: ImageSource, store: ImageStore) -> ImportResult | None:
    """Return an earlier import of the same image, linked to this name.

    That the layers of a registry's image match its configuration is known only once they were read. Until then, an
    earlier import counts as the same image only if it came from the same manifest.
    """
    manifest = manifest_if_intact(store.file(source.image_id, source.format))
    if manifest is None or not (source.is_vouched_for or manifest.registry_digest == source.registry_digest):
        return None
    return _found(reference, source, store, manifest)


def _under_new_manifest(reference: str, source: ImageSource, store: ImageStore) -> ImportResult | None:
    """Return an earlier import of the same image, whose registry manifest differs; the layers have been compared.

    The file is not replaced: jobs may have it open.
    """
    manifest = manifest_if_intact(store.file(source.image_id, source.format))
    if manifest is None:
        return None
    manifest = replace(manifest, registry_digest=source.registry_digest)
    store.record(manifest)
    return _found(reference, source, store, manifest)


def _found(reference: str, source: ImageSource, store: ImageStore, manifest: ImportManifest) -> ImportResult:
    """Point the link of this name to the file of an earlier import."""
    final = store.file(source.image_id, source.format)
    link = store.link(reference, source.format)
    if not link.is_symlink() or link.readlink().name != final.name:
        store.prepare()
        store.point(reference, final, source.format)
    return ImportResult(final, link, manifest, is_new=False)


def _make_manifest(
    reference: str, source: ImageSource, partial: Path, file: str, made: MadeFile, report: Report
) -> ImportManifest:
    digests = digest_file(partial, advance=ByteCounter(report, "computing digests", partial.stat().st_size).advance)
    return ImportManifest(
        reference=reference,
        image_id=source.image_id,
        registry_digest=source.registry_digest,
        source=source.origin,
        made_by=made.made_by,
        format=source.format,
        file=file,
        size=digests.size,
        sha256=digests.sha256,
        block_size=BLOCK_SIZE,
        blocks=digests.blocks,
        root_bytes=made.contents.num_bytes,
        num_entries=made.contents.num_entries,
        labels=source.config.labels,
        sbom=sbom_file(Path(file)).name if made.contents.sbom else "",
        imported=time.time(),
        ftkit_version=__version__,
        left_out=tuple(made.contents.left_out),
    )
