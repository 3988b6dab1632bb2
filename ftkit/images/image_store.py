"""The folder of imported images: files named by digest, each with a manifest, and links named `NAME+TAG`."""

from __future__ import annotations

import errno
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from ftkit.config.image_reference import Digest, ImageFormat, NamedImage
from ftkit.errors import PrerequisiteError, one_line
from ftkit.files import file_lock, mode_of_new_files, publish, read_json_if_valid, remove, sync, write_file, write_json
from ftkit.images.squashfs import disk_full

_MANIFEST_VERSION = 2
"""Version of ftkit's conversion. It is part of a file's name, so that no new file replaces one that a job has open."""

_PARTIAL = ".partial-"


@dataclass(frozen=True)
class ImportManifest:
    reference: str
    image_id: Digest  # digest of its configuration, which names the file
    registry_digest: Annotated[Digest | None, BeforeValidator(lambda value: value or None)]
    source: str
    made_by: str  # program that made the file, with its options
    format: ImageFormat
    file: str
    size: int
    sha256: str  # of the file
    block_size: Annotated[int, Field(gt=0)]
    blocks: tuple[str, ...]  # SHA-256 of each `block_size` bytes of it
    root_bytes: int
    num_entries: int
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
        """Yield a temporary path for a file under its lock, without what killed imports left; remove it afterwards."""
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
        return [path for path in self.root.glob(f"{_PARTIAL}*") if path.stat().st_mtime < limit]

    def publish(self, partial: Path, manifest: ImportManifest, sbom: bytes) -> Path:
        """Rename a finished file to its final name, write its manifest, and point the link to it."""
        final = self.root / manifest.file
        if manifest.sbom:
            write_file(sbom_file(final), sbom)
        partial.chmod(mode_of_new_files(self.root))
        publish(partial, final)
        self.record(manifest)
        self.point(manifest.reference, final, manifest.format)
        return final

    def record(self, manifest: ImportManifest) -> None:
        write_json(manifest_file(self.root / manifest.file), manifest)

    def point(self, reference: str, final: Path, image_format: ImageFormat) -> None:
        """Point the link of a name to a file."""
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
