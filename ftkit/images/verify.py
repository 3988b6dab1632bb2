"""Tell whether an imported image is still what was imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ftkit.errors import FtkitError, ImageError, NotFoundError
from ftkit.images import squashfs
from ftkit.images.oci.digests import differing_ranges, digest_file
from ftkit.images.progress import Progress, Report, say_nothing
from ftkit.images.store import ImportManifest, manifest_file, read_manifest

_NUM_RANGES_SHOWN = 5


@dataclass(frozen=True)
class Verdict:
    """The result of a verification: every difference by name; none: the file is what was imported."""

    file: Path
    manifest: ImportManifest
    differences: tuple[str, ...]


def looks_whole(file: Path) -> ImportManifest | None:
    """Check size and head of a file against its manifest, in a moment; None if they don't fit."""
    manifest = read_manifest(file)
    try:
        if manifest is None or file.stat().st_size != manifest.size:
            return None
        if manifest.format == "sqsh":
            squashfs.check_whole(file)
    except (OSError, FtkitError):
        return None
    return manifest


def required_manifest(file: Path, name: str) -> ImportManifest:
    """Return the manifest of a file, imported as `name`.

    Raises:
        NotFoundError: there is no file.
        ImageError: there is no manifest, or it can't be read.
    """
    if not file.exists():
        raise NotFoundError(f"{file} is not there", fix=f"import it: ftkit import {name}")
    manifest = read_manifest(file.resolve())
    if manifest is None:
        raise ImageError(
            f"there is nothing to verify {file} against: {manifest_file(file.resolve()).name} is missing or damaged",
            meaning="the file was not made by 'ftkit import', or its manifest was removed",
            fix=f"import the image again: ftkit import {name} --force",
        )
    return manifest


def verify(file: Path, report: Report = say_nothing, *, name: str = "NAME:TAG") -> Verdict:
    """Recompute the digests of a file, imported as `name`, and compare them with its manifest.

    Raises:
        NotFoundError: there is no file.
        ImageError: there is no manifest.
    """
    manifest = required_manifest(file, name)
    path = file.resolve()
    size = path.stat().st_size
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        report(Progress(f"verifying {file.name}", done=done, total=size))

    found = digest_file(path, manifest.block_size, advance)
    differences = _of_size(found.size, manifest)
    ranges = differing_ranges(manifest.blocks, found.blocks, manifest.block_size)
    differences += [f"content: {part} differ" for part in ranges[:_NUM_RANGES_SHOWN]]
    if len(ranges) > _NUM_RANGES_SHOWN:
        differences.append(f"content: {len(ranges) - _NUM_RANGES_SHOWN} more ranges differ")
    if found.sha256 != manifest.sha256 and not differences:
        differences.append(f"sha256: {found.sha256}, the manifest says {manifest.sha256}")
    if path.name != manifest.file or not path.name.startswith(f"{manifest.image_id.file_name}."):
        differences.append(f"name: {path.name}, the manifest says {manifest.file} of {manifest.image_id}")
    return Verdict(file, manifest, tuple(differences))


def _of_size(size: int, manifest: ImportManifest) -> list[str]:
    if size == manifest.size:
        return []
    verb = "truncated" if size < manifest.size else "longer than it was"
    return [f"size: {verb}: {size} bytes, the manifest says {manifest.size}"]


def require_same(verdict: Verdict) -> None:
    """Raise if a file differs.

    Raises:
        ImageError: with every difference.
    """
    if verdict.differences:
        raise ImageError(
            "\n    ".join((f"{verdict.file} is not what was imported:", *verdict.differences)),
            meaning="the disk or a copy damaged it, or someone changed it",
            fix=f"import it again: ftkit import {verdict.manifest.reference} --force",
        )
