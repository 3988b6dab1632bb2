"""Import an image, from the docker engine or a registry, into one file on the shared file system."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Final, Literal, Protocol

from ftkit import __version__
from ftkit.config.cluster import ClusterProfile
from ftkit.config.image_reference import Digest, DockerdImage, ImageFormat, ImportableImage, NamedImage, RegistryImage
from ftkit.errors import ConfigError, ImageError, NotFoundError, PrerequisiteError, Problem, missing_package_error
from ftkit.images import docker_engine, enroot, squashfs
from ftkit.images.events import ByteCounter, ProgressEvent, Report, ignore_progress
from ftkit.images.image_store import ImageStore, ImportManifest, sbom_file
from ftkit.images.oci.credentials import Credentials, find_credentials
from ftkit.images.oci.documents import RunConfig
from ftkit.images.oci.registry import Registry
from ftkit.images.oci.tar import Entry, Layer, TarReader, flatten
from ftkit.images.signatures import require_in_registry
from ftkit.images.squashfs import ImageConfig, MadeFile, build_squashfs, disk_full
from ftkit.images.verify import BLOCK_SIZE, digest_file, manifest_if_intact

if TYPE_CHECKING:
    from ftkit.images.docker_engine import DockerImage


_MAX_PARALLEL_DOWNLOADS: Final = 3
_SIF_MAGIC_END: Final = 32 + len(b"SIF_MAGIC")


class ImageSource(Protocol):
    """An image that can be imported into a file of a format."""

    format: ImageFormat
    image_id: Digest  # of its configuration, which lists the layers, and so identifies it everywhere
    is_vouched_for: bool  # the docker engine has compared the layers with the configuration already
    config: ImageConfig
    origin: str

    @property
    def registry_digest(self) -> Digest | None: ...

    def make_file(self, partial: Path, report: Report) -> MadeFile:
        """Write the image's file."""


class DockerSource:
    """An image in the docker engine, read from its export."""

    format: ImageFormat = "sqsh"
    is_vouched_for: bool = True

    def __init__(self, name: str, image: DockerImage) -> None:
        self._size = image.size
        self.image_id = image.id
        self.config = image.config
        self.registry_digest = next((digest for _, digest in image.repo_digests), None)
        self.origin = f"docker engine, {name}"

    def enroot_address(self) -> enroot.Address:
        """Return enroot's address of exactly this image."""
        uri = f"dockerd://{self.image_id}"  # its name can move
        return enroot.Address(uri, uri)

    def make_file(self, partial: Path, report: Report) -> MadeFile:
        """Export the image, and build the file from the stream."""
        with docker_engine.connect() as client, docker_engine.exported(client, self.image_id) as stream:
            entries = members_of(TarReader(stream))
            return build_squashfs(entries, self.config, partial, root_bytes=self._size or None, report=report)


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
        configuration = registry.configuration(manifest)
        self._layers = list(zip(manifest.layers, configuration.rootfs.diff_ids, strict=True))
        self.registry_digest = self.digests[-1]
        self.image_id = manifest.config.digest
        self.config = docker_engine.image_config(configuration.config or RunConfig(), configuration.created)
        self.origin = f"registry, {self._reference}"

    def enroot_address(self) -> enroot.Address:
        """Return enroot's address of exactly this image."""
        layers = ((layer.digest, diff_id) for layer, diff_id in self._layers)
        return enroot.address_in_registry(self._reference, self.registry_digest, self.image_id, layers)

    def make_file(self, partial: Path, report: Report) -> MadeFile:
        """Download the compressed layers, and build the file from their flattened content."""
        folder = partial.with_name(f"{partial.name}.layers")
        folder.mkdir(mode=0o700)
        try:
            self._download(folder, report)
            layers = [Layer(folder / layer.digest.file_name, diff_id) for layer, diff_id in self._layers]
            return build_squashfs(flatten(layers), self.config, partial, root_bytes=None, report=report)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            self._registry.close()

    def _download(self, folder: Path, report: Report) -> None:
        """Download each layer, a few at once. If one fails or is interrupted, the others stop at their next chunk."""
        distinct = {layer.digest: layer for layer, _ in self._layers}.values()
        num_bytes = sum(layer.size for layer in distinct)
        if num_bytes > shutil.disk_usage(folder).free:
            raise disk_full(folder.parent)
        counter = ByteCounter(report, self._registry.stage, num_bytes)
        is_stopped = Event()

        def advance(num_bytes: int) -> None:
            if is_stopped.is_set():
                raise CancelledError
            counter.advance(num_bytes)

        with ThreadPoolExecutor(_MAX_PARALLEL_DOWNLOADS) as pool:
            jobs = [
                pool.submit(self._registry.download, layer, folder / layer.digest.file_name, advance)
                for layer in distinct
            ]
            try:
                for job in as_completed(jobs):
                    job.result()
            except BaseException:
                is_stopped.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise


class SifSource:
    """An image that Apptainer or Singularity pulls, and that `known` identifies."""

    format: ImageFormat = "sif"

    def __init__(self, known: DockerSource | RegistrySource, remote: RegistryImage | None) -> None:
        self._remote = None if isinstance(known, DockerSource) else remote
        self.image_id = known.image_id
        self.registry_digest = known.registry_digest
        self.is_vouched_for = known.is_vouched_for
        self.config = known.config
        self.origin = known.origin

    def make_file(self, partial: Path, report: Report) -> MadeFile:
        """Run the program, and report its output, all of which is on stderr."""
        program = shutil.which("apptainer") or shutil.which("singularity")
        if program is None:
            raise PrerequisiteError(
                "neither 'apptainer' nor 'singularity' was found on PATH",
                meaning="one of them is needed to make SIF files",
                fix="install one, or use a machine that has one; often: module load apptainer",
            )
        try:
            from spython.utils import stream_command  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise missing_package_error(["spython"]) from error
        name = Path(program).name
        address = f"docker-daemon:{self.image_id}"  # by id or digest, because names and tags can move
        known = None
        if self._remote:
            address = f"docker://{replace(self._remote, digest=self.registry_digest).pinned}"
            known = find_credentials(self._remote.host)
        output: list[str] = []
        with _in_environment(known):
            try:
                for line in stream_command([program, "build", str(partial), address], output_type="both"):
                    output.append(line.rstrip())
                    report(ProgressEvent(f"{name} builds SIF", text=output[-1]))
            except subprocess.CalledProcessError as error:
                raise squashfs.explain_failure(program, "\n".join(output), partial) from error
        with partial.open("rb") as file:
            if not file.read(_SIF_MAGIC_END).endswith(b"SIF_MAGIC"):
                raise ImageError(f"{program} wrote no SIF file", fix=f"see its output: apptainer build x.sif {address}")
        return MadeFile(name)


@contextmanager
def _in_environment(known: Credentials | None) -> Iterator[None]:
    """Set the program's environment variables for credentials: spython passes this process's environment to it."""
    before = dict(os.environ)
    if known:
        for prefix in ("APPTAINER", "SINGULARITY"):
            os.environ[f"{prefix}_DOCKER_USERNAME"] = known.username
            os.environ[f"{prefix}_DOCKER_PASSWORD"] = known.password
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


ImportMethod = Literal["auto", "enroot", "ftkit"]


@dataclass(frozen=True)
class ImportRequest:
    """A request to import an image."""

    image: ImportableImage
    registry: str | None  # that has a `NAME:TAG` if the docker engine does not
    cluster: ClusterProfile
    format: ImageFormat = "sqsh"
    on_node: bool = False  # import with enroot on a compute node
    method: ImportMethod = "auto"
    public_key: Path | None = None  # the image must be signed with it; signatures are in registries

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
    """Return the source to import from."""
    if request.on_node:
        where, message, fix = "", "", "Leave --on-node out."
        if request.format == "sif":
            message = "SIF files are made on this machine."
        elif request.cluster.scheduler != "slurm":
            where, message = f"cluster {request.cluster.name}", "this cluster has no Slurm."
        elif request.registry_image is None:
            message = "a compute node can't reach this machine's docker engine."
            fix = "Push the image, and give --registry or a docker:// address."
        if message:
            raise ConfigError([Problem(where, "--on-node", message, fix)])
        return enroot.EnrootSource(_registry_source(request, report), enroot.compute_node(request.cluster))
    known = (None if request.public_key else _docker_source(request.image)) or _registry_source(request, report)
    if request.format == "sif":
        return SifSource(known, request.registry_image)
    needs_enroot = squashfs.find_tool() is None and shutil.which("enroot") is not None
    uses_enroot = request.method == "enroot" or (request.method == "auto" and needs_enroot)
    return enroot.EnrootSource(known) if uses_enroot else known


def _docker_source(image: ImportableImage) -> DockerSource | None:
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
    reference: str, source: ImageSource, store: ImageStore, *, force: bool = False, report: Report = ignore_progress
) -> ImportResult:
    """Import `source` as `NAME:TAG`, unless the same image is imported already."""
    final = store.file(source.image_id, source.format)
    link = store.link(reference, source.format)

    def existing(*, layers_were_compared: bool = False) -> ImportResult | None:
        """Return an earlier import of the same image, linked to this name."""
        manifest = None if force else manifest_if_intact(final)
        if manifest is None:
            return None
        if manifest.registry_digest != source.registry_digest:
            if layers_were_compared:  # under a new manifest; the file is not replaced, because jobs may have it open
                manifest = replace(manifest, registry_digest=source.registry_digest)
                store.record(manifest)
            elif not source.is_vouched_for:  # whether layers match their configuration is known once they were read
                return None
        if not link.is_symlink() or link.readlink().name != final.name:
            store.prepare()
            store.point(reference, final, source.format)
        return ImportResult(final, link, manifest, is_new=False)

    if found := existing():
        return found
    store.prepare()
    waiting = partial(report, ProgressEvent("waiting for another import of this image"))
    with store.partial(final, waiting) as temporary:
        if found := existing():
            return found
        made = source.make_file(temporary, report)
        # Some releases of Apptainer don't compare layers with the configuration: its file is always made again.
        if source.format == "sqsh" and (found := existing(layers_were_compared=True)):
            return found
        counter = ByteCounter(report, "computing digests", temporary.stat().st_size)
        digests = digest_file(temporary, advance=counter.advance)
        manifest = ImportManifest(
            reference=reference, image_id=source.image_id, registry_digest=source.registry_digest, source=source.origin,
            made_by=made.made_by, format=source.format, file=final.name, size=digests.size, sha256=digests.sha256,
            block_size=BLOCK_SIZE, blocks=digests.blocks, root_bytes=made.num_bytes, num_entries=made.num_entries,
            labels=source.config.labels, sbom=sbom_file(final).name if made.sbom else "", imported=time.time(),
            ftkit_version=__version__, left_out=made.left_out,
        )  # fmt: skip
        store.publish(temporary, manifest, made.sbom)
    return ImportResult(final, link, manifest, is_new=True)
