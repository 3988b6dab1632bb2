"""Import an image into one file on the shared file system, with a manifest of its content."""

from __future__ import annotations

import errno
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit import __version__
from ftkit.images.progress import ByteCounter, ProgressEvent, Report, ignore_progress
from ftkit.images.squashfs import MadeFile, disk_full
from ftkit.images.store import ImportManifest, sbom_file
from ftkit.images.verify import BLOCK_SIZE, digest_file, manifest_if_intact

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.images.sources import ImageSource
    from ftkit.images.store import ImageStore


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
        if store.older_file(source.image_id, source.format).exists():
            report(
                ProgressEvent(f"{reference} was imported by an older ftkit, which verified less: importing it again")
            )
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
