"""The folder of imported images: files named by digest, each with a manifest, and links named `NAME+TAG`.

Also find images in other places, and images that may be removed.
"""

from __future__ import annotations

import errno
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

from pydantic import Field

from ftkit.config.image_reference import Digest, ImageFormat, NamedImage
from ftkit.errors import FtkitError, ImageError, PrerequisiteError, one_line
from ftkit.files import file_lock, mode_of_new_files, publish, read_json_if_valid, remove, sync, write_file, write_json
from ftkit.images import docker_engine
from ftkit.images.docker_engine import DockerImage
from ftkit.images.squashfs import check_squashfs, disk_full
from ftkit.runs.signing import signature_file

_MANIFEST_VERSION = 2
"""Version of ftkit's conversion. It is part of file names, so a new file never replaces one that a job has open."""

_PARTIAL = ".partial-"


@dataclass(frozen=True)
class ImportManifest:
    reference: str
    image_id: Digest  # digest of its configuration, which names the file
    registry_digest: Digest | None
    source: str
    made_by: str  # program that made the file, with its options
    format: ImageFormat
    file: str
    size: int
    sha256: str  # of the file
    block_size: Annotated[int, Field(gt=0)]
    blocks: tuple[str, ...]  # SHA-256 of each `block_size` bytes of it
    labels: dict[str, str]
    sbom: str
    imported: float
    ftkit_version: str
    left_out: tuple[str, ...] = ()  # devices and pipes, which only root can unpack
    version: int = _MANIFEST_VERSION


@dataclass(frozen=True)
class ImageStore:
    root: Path

    def file(self, image_id: Digest, image_format: ImageFormat) -> Path:
        """Return the file of an image, named by the digest that determines its content."""
        return self.root / f"{image_id.file_name}.v{_MANIFEST_VERSION}.{image_format}"

    def link(self, reference: str, image_format: ImageFormat) -> Path:
        """Return the link to the file, named by `NAME:TAG`."""
        return self.root / NamedImage(reference).file_name(image_format)

    def prepare(self) -> None:
        """Create the folder; PrerequisiteError if that fails, or if it can't be written to."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            mode_of_new_files(self.root)  # creates one
        except OSError as error:
            raise PrerequisiteError(
                f"can't write images to {self.root}: {one_line(error)}",
                meaning="the workspace is read-only or full, belongs to someone else, or is not mounted here",
                fix="set FTKIT_WORKSPACE or 'workspace:' in ftkit.yaml; 'ftkit config' shows where it is set",
            ) from error

    @contextmanager
    def partial(self, final: Path, on_wait: Callable[[], object]) -> Iterator[Path]:
        """Yield a temporary path for a file under its lock, after removing leftovers; remove the path afterwards."""
        path = final.with_name(f"{_PARTIAL}{final.name}.{secrets.token_hex(4)}")
        with file_lock(self.root / f".{final.name}.lock", on_wait):
            for left in self.root.glob(f"{_PARTIAL}{final.name}.*"):
                remove(left)
            try:
                yield path
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise disk_full(self.root) from error
                raise
            finally:
                remove(path)

    def leftovers(self) -> list[Path]:
        """Return partial files older than a day, which killed imports left; newer ones may still be written."""
        limit = time.time() - 24 * 3600
        found = []
        for path in self.root.glob(f"{_PARTIAL}*"):
            with suppress(FileNotFoundError):  # its import just ended
                found += [path] if path.stat().st_mtime < limit else []
        return found

    def publish(self, partial: Path, manifest: ImportManifest, sbom: bytes) -> None:
        """Rename a finished file to its final name, write its manifest, and point the link to it."""
        final = self.root / manifest.file
        if manifest.sbom:
            write_file(sbom_file(final), sbom)
        partial.chmod(mode_of_new_files(self.root))
        publish(partial, final)
        self.record(manifest)
        self.point(manifest.reference, final, manifest.format)

    def record(self, manifest: ImportManifest) -> None:
        write_json(manifest_file(self.root / manifest.file), manifest)

    def point(self, reference: str, final: Path, image_format: ImageFormat) -> None:
        link = self.link(reference, image_format)
        new_link = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
        new_link.symlink_to(final.name)
        new_link.replace(link)
        sync(self.root)

    def files(self, pattern: str) -> list[Path]:
        """Return the image files, or the links to them, whose name matches a pattern."""
        return sorted(path for suffix in ("sqsh", "sif") for path in self.root.glob(f"{pattern}.{suffix}"))


def manifest_file(image: Path) -> Path:
    return image.with_name(f"{image.name}.json")


def sbom_file(image: Path) -> Path:
    return image.with_name(f"{image.name}.sbom.json")


def read_manifest(image: Path) -> ImportManifest | None:
    """Read the manifest of an image file; None if there is none, it can't be read, or it has another version."""
    manifest = read_json_if_valid(manifest_file(image), ImportManifest)
    return manifest if manifest and manifest.version == _MANIFEST_VERSION else None


def manifest_if_intact(file: Path) -> ImportManifest | None:
    """Return the manifest if the size and the superblock of the file match it, else None. Reads no content."""
    manifest = read_manifest(file)
    try:
        if manifest is None or file.stat().st_size != manifest.size:
            return None
        if manifest.format == "sqsh":
            check_squashfs(file)
    except (OSError, FtkitError):
        return None
    return manifest


# --- Where images are: built, pushed, imported; and which may be removed ---------------------------


@dataclass(frozen=True)
class ImportedFile:
    """A link to an imported file; `manifest` is None if the file is damaged, or was not made by ftkit."""

    link: Path
    size: int
    manifest: ImportManifest | None


@dataclass(frozen=True)
class ImageStatus:
    reference: str
    built: DockerImage | None
    imported: tuple[ImportedFile, ...]

    @property
    def pushed(self) -> tuple[str, ...]:
        """Repositories that have the image, each with its digest there."""
        return tuple(f"{repository}@{digest}" for repository, digest in self.built.repo_digests) if self.built else ()

    @property
    def sources(self) -> set[str]:
        """Where the imported files came from."""
        return {file.manifest.source for file in self.imported if file.manifest}

    @property
    def is_current(self) -> bool:
        """Whether imported files match the built image; true if it was not imported or not built."""
        ids = {file.manifest.image_id for file in self.imported if file.manifest}
        return not ids or self.built is None or ids == {self.built.id}


def image_statuses(references: Sequence[str], store: ImageStore) -> tuple[list[ImageStatus], bool]:
    """Return the status of each image, and whether a docker engine responded."""
    try:
        with docker_engine.connect() as client:
            built = [docker_engine.inspect(client, NamedImage(reference).docker_name) for reference in references]
        has_docker = True
    except PrerequisiteError:
        built, has_docker = [None] * len(references), False
    both = zip(references, built, strict=True)
    return [ImageStatus(reference, image, _imported(reference, store)) for reference, image in both], has_docker


def undefined_statuses(defined: Collection[str], store: ImageStore) -> list[ImageStatus]:
    """Return the status of each imported image without a definition; it is not looked up in the docker engine."""
    found = dict.fromkeys(link.stem.replace("+", ":") for link in store.files("*+*") if link.is_file())
    return [ImageStatus(each, None, _imported(each, store)) for each in found if each not in defined]


def _imported(reference: str, store: ImageStore) -> tuple[ImportedFile, ...]:
    links = [link for each in get_args(ImageFormat) if (link := store.link(reference, each)).is_file()]
    return tuple(ImportedFile(link, link.stat().st_size, manifest_if_intact(link.resolve())) for link in links)


def is_unpinned(image: DockerImage) -> bool:
    return image.config.labels.get(docker_engine.UNPINNED_LABEL) == "true"


@dataclass(frozen=True)
class Removable:
    """Files, or an image of the docker engine with its `docker_id`, that may be removed."""

    name: str
    reason: str
    size: int
    paths: tuple[Path, ...] = ()
    docker_id: str = ""


def find_removable(store: ImageStore, in_use: Iterable[Path]) -> list[Removable]:
    """Return images that no link and no run uses, leftovers of killed imports, and older builds."""
    kept = {path.resolve() for path in (*in_use, *(link for link in store.files("*") if link.is_symlink()))}
    found = []
    for path in store.files("sha256-*"):
        if path.resolve() not in kept:
            manifest = read_manifest(path)
            name = manifest.reference if manifest else path.name
            files = (path, manifest_file(path), sbom_file(path), signature_file(manifest_file(path)))
            found.append(Removable(name, "no name points to it", path.stat().st_size, files))
    for path in store.leftovers():
        size = sum(inner.stat().st_size for inner in (path, *path.rglob("*")) if inner.is_file())
        found.append(Removable(path.name, "a killed import left it", size, (path,)))
    try:
        with docker_engine.connect() as client:
            docker_engine.remove_abandoned(client)  # otherwise docker refuses to remove their images
            images = client.images(filters={"label": docker_engine.REFERENCE_LABEL, "dangling": True})
    except (PrerequisiteError, ImageError):
        return found
    for image in images:
        reference = (image.get("Labels") or {}).get(docker_engine.REFERENCE_LABEL, "")
        reason = "an older build, in the docker engine"
        found.append(Removable(reference, reason, int(image.get("Size") or 0), docker_id=str(image["Id"])))
    return found


def remove_all(removables: Iterable[Removable]) -> int:
    """Remove them, and return the freed bytes; images that are in use are skipped."""
    freed = 0
    for removable in removables:
        for path in removable.paths:
            remove(path)
        if removable.docker_id:
            try:
                with docker_engine.connect() as client:
                    client.remove_image(removable.docker_id)
            except ImageError:
                continue
        freed += removable.size
    return freed
