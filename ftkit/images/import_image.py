"""Import an image, from the docker engine or a registry, into one file on the shared file system."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Final, Literal

from ftkit import __version__
from ftkit.config.cluster import ClusterProfile
from ftkit.config.image_reference import Digest, DockerdImage, ImageFormat, ImportableImage, NamedImage, RegistryImage
from ftkit.errors import ConfigError, ImageError, NotFoundError, PrerequisiteError, Problem, missing_package_error
from ftkit.images import docker_engine, enroot, squashfs
from ftkit.images.events import ByteCounter, ProgressEvent, Report, ignore_progress
from ftkit.images.image_store import ImageStore, ImportManifest, manifest_if_intact, sbom_file
from ftkit.images.oci.connection import Credentials, find_credentials
from ftkit.images.oci.documents import Descriptor, RunConfig
from ftkit.images.oci.registry import Registry
from ftkit.images.oci.tar import Entry, Layer, TarReader, flatten
from ftkit.images.signatures import require_in_registry
from ftkit.images.squashfs import ImageConfig, MadeFile, build_squashfs, disk_full
from ftkit.images.verify import BLOCK_SIZE, digest_file

if TYPE_CHECKING:
    from ftkit.images.docker_engine import DockerImage


_MAX_PARALLEL_DOWNLOADS: Final = 3
_SIF_MAGIC_END: Final = 32 + len(b"SIF_MAGIC")


@dataclass(frozen=True)
class ImageSource:
    origin: str
    image_id: Digest  # digest of its configuration, which lists the layers and so identifies the image everywhere
    config: ImageConfig
    digests: tuple[Digest, ...]  # in a registry: those that lead to its manifest, its own last; empty if unknown
    make_file: Callable[[Path, Report], MadeFile]
    address: enroot.Address  # of exactly this image
    is_vouched_for: bool = False  # the docker engine has already verified the layers against the configuration
    format: ImageFormat = "sqsh"

    @property
    def registry_digest(self) -> Digest | None:
        return self.digests[-1] if self.digests else None


def docker_source(name: str, image: DockerImage) -> ImageSource:
    """Return an image in the docker engine, read from its export."""

    def make_file(partial: Path, report: Report) -> MadeFile:
        with docker_engine.connect() as client, docker_engine.exported(client, image.id) as stream:
            entries = members_of(TarReader(stream))
            return build_squashfs(entries, image.config, partial, root_bytes=image.size or None, report=report)

    uri = f"dockerd://{image.id}"  # its name can move
    digests = tuple(digest for _, digest in image.repo_digests[:1])
    address = enroot.Address(uri, uri)
    return ImageSource(
        f"docker engine, {name}", image.id, image.config, digests, make_file, address, is_vouched_for=True
    )


def members_of(reader: TarReader) -> Iterator[Entry]:
    for member in reader:
        yield member, reader.content()


def registry_source(reference: RegistryImage, registry: Registry, *, is_for_nodes: bool = False) -> ImageSource:
    """Return an image in a registry, read from its layers."""
    manifest, digests = registry.manifest()
    configuration = registry.configuration(manifest, is_for_nodes=is_for_nodes)
    diff_ids = configuration.diff_ids
    config = docker_engine.image_config(configuration.config or RunConfig(), configuration.created)

    def make_file(partial: Path, report: Report) -> MadeFile:
        folder = partial.with_name(f"{partial.name}.layers")
        folder.mkdir(mode=0o700)
        try:
            _download(registry, manifest.layers, folder, report)
            files = [folder / layer.digest.file_name for layer in manifest.layers]
            layers = [Layer(file, diff_id) for file, diff_id in zip(files, diff_ids, strict=True)]
            return build_squashfs(flatten(layers), config, partial, root_bytes=None, report=report)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            registry.close()

    blobs = [(layer.digest, diff_id) for layer, diff_id in zip(manifest.layers, diff_ids, strict=True)]
    address = enroot.address_in_registry(reference, digests[-1], manifest.config.digest, blobs)
    return ImageSource(f"registry, {reference}", manifest.config.digest, config, digests, make_file, address)


def _download(registry: Registry, layers: Iterable[Descriptor], folder: Path, report: Report) -> None:
    """Download layers, a few in parallel. If one fails or is interrupted, the others stop at their next chunk."""
    distinct = {layer.digest: layer for layer in layers}.values()
    num_bytes = sum(layer.size for layer in distinct)
    if num_bytes > shutil.disk_usage(folder).free:
        raise disk_full(folder.parent)
    counter = ByteCounter(report, registry.stage, num_bytes)
    is_stopped = Event()

    def advance(num_bytes: int) -> None:
        if is_stopped.is_set():
            raise CancelledError
        counter.advance(num_bytes)

    with ThreadPoolExecutor(_MAX_PARALLEL_DOWNLOADS) as pool:
        jobs = [pool.submit(registry.download, each, folder / each.digest.file_name, advance) for each in distinct]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:
            is_stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def by_enroot(known: ImageSource, node: enroot.ComputeNode | None = None) -> ImageSource:
    """Return a known image whose file enroot makes, on a compute node if one is given."""

    def make_file(partial: Path, report: Report) -> MadeFile:
        report(ProgressEvent(f"enroot imports {known.address.uri}"))
        enroot.import_to(partial, known.address, node)
        return MadeFile(f"enroot, {squashfs.ENROOT_OPTIONS}", sbom=squashfs.read_file(partial, squashfs.SBOM_PATH))

    return replace(known, origin=f"enroot, {known.address.uri}", make_file=make_file)


def _make_sif(known: ImageSource, remote: RegistryImage | None, output: Path, report: Report) -> MadeFile:
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
    address = f"docker-daemon:{known.image_id}"  # by id or digest, because names and tags can move
    credentials = None
    if remote:
        address = f"docker://{replace(remote, digest=known.registry_digest).pinned}"
        credentials = find_credentials(remote.host)
    lines: list[str] = []
    with _in_environment(credentials):
        try:
            for line in stream_command([program, "build", str(output), address], output_type="both"):
                lines.append(line.rstrip())
                report(ProgressEvent(f"{name} builds SIF", text=lines[-1]))
        except subprocess.CalledProcessError as error:
            raise squashfs.explain_failure(program, "\n".join(lines), output) from error
    with output.open("rb") as file:
        if not file.read(_SIF_MAGIC_END).endswith(b"SIF_MAGIC"):
            raise ImageError(f"{program} wrote no SIF file", fix=f"see its output: apptainer build x.sif {address}")
    return MadeFile(name)


@contextmanager
def _in_environment(credentials: Credentials | None) -> Iterator[None]:
    """Set the program's environment variables for credentials: spython passes this process's environment to it."""
    before = dict(os.environ)
    if credentials:
        for prefix in ("APPTAINER", "SINGULARITY"):
            os.environ[f"{prefix}_DOCKER_USERNAME"] = credentials.username
            os.environ[f"{prefix}_DOCKER_PASSWORD"] = credentials.password
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


ImportMethod = Literal["auto", "enroot", "ftkit"]


@dataclass(frozen=True)
class ImportRequest:
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
        return by_enroot(_registry_source(request, report), enroot.compute_node(request.cluster))
    in_docker = None if request.public_key else _docker_source(request.image)
    known = in_docker or _registry_source(request, report)
    if request.format == "sif":
        remote = None if in_docker else request.registry_image
        return replace(known, format="sif", make_file=partial(_make_sif, known, remote))
    needs_enroot = squashfs.find_tool() is None and shutil.which("enroot") is not None
    uses_enroot = request.method == "enroot" or (request.method == "auto" and needs_enroot)
    return by_enroot(known) if uses_enroot else known


def _docker_source(image: ImportableImage) -> ImageSource | None:
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
    return docker_source(image.docker_name, found) if found else None


def _registry_source(request: ImportRequest, report: Report) -> ImageSource:
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
    source = registry_source(remote, registry, is_for_nodes=request.on_node)
    if request.public_key:
        require_in_registry(registry, None if remote.digest else request.name, source.digests, request.public_key)
    return source


@dataclass(frozen=True)
class ImportResult:
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
    with store.partial(final, partial(report, ProgressEvent("waiting for another import of this image"))) as temporary:
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
            block_size=BLOCK_SIZE, blocks=digests.blocks,
            labels=source.config.labels, sbom=sbom_file(final).name if made.sbom else "", imported=time.time(),
            ftkit_version=__version__, left_out=made.left_out,
        )  # fmt: skip
        store.publish(temporary, manifest, made.sbom)
    return ImportResult(final, link, manifest, is_new=True)
