"""SIF images for Apptainer and Singularity, made by that program, which spython drives."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit import __version__
from ftkit.errors import ImageError, PrerequisiteError
from ftkit.images import credentials
from ftkit.images.choosing import choose_source, remote_of
from ftkit.images.digests import BLOCK_SIZE, digest_file
from ftkit.images.importing import Imported, full_disk_is_said
from ftkit.images.packing import ByteCounter
from ftkit.images.progress import Progress
from ftkit.images.sources import EngineSource
from ftkit.images.squashfs import explain_failure
from ftkit.images.store import ImportManifest
from ftkit.images.verify import looks_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.images.choosing import ImportWish
    from ftkit.images.progress import Report
    from ftkit.images.sources import ImageSource
    from ftkit.images.store import ImageStore

_PROGRAMS = ("apptainer", "singularity")
_MAGIC = b"SIF_MAGIC"
_MAGIC_AT = 32


def find_program() -> str:
    """Return the path of Apptainer or Singularity.

    Raises:
        PrerequisiteError: neither is there.
    """
    for name in _PROGRAMS:
        if found := shutil.which(name):
            return found
    raise PrerequisiteError(
        "neither 'apptainer' nor 'singularity' was found on PATH",
        meaning="SIF files are made by that program",
        fix="install it, or log in where it is; often: module load apptainer",
    )


def import_sif(name: str, wish: ImportWish, store: ImageStore, *, force: bool, report: Report) -> Imported:
    """Import an image as SIF, unless the same image is there already.

    Raises:
        PrerequisiteError: a program is missing.
        ImageError: it failed.
    """
    source = choose_source(wish, report)
    final = store.file(source.image_id, "sif")
    found = None if force else looks_whole(final)
    if found is None:
        program = find_program()
        store.prepare()
        with store.locked(f"{source.image_id}.sif"):
            found = None if force else looks_whole(final)
            if found is None:
                with store.partial(final) as partial, full_disk_is_said(store.root):
                    _build(program, wish, source, partial, report)
                    manifest = _describe(name, source, partial, final, program, report)
                    store.publish(partial, manifest, b"")
                return Imported(final, store.link(name, "sif"), manifest, is_new=True)
    store.point(name, final, "sif")
    return Imported(final, store.link(name, "sif"), found, is_new=False)


def _build(program: str, wish: ImportWish, source: ImageSource, partial: Path, report: Report) -> None:
    """Run the program, and report what it says: all of it comes on its standard error."""
    try:
        from spython.utils import stream_command  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise PrerequisiteError(
            "the Python package 'spython' is not installed", fix="pip install 'ftkit[images]'"
        ) from error
    remote = remote_of(wish)
    address = f"docker-daemon:{source.name}" if isinstance(source, EngineSource) else f"docker://{remote}"
    known = None if isinstance(source, EngineSource) or remote is None else credentials.find(remote.host)
    said: list[str] = []
    with _in_environment(known):
        try:
            for line in stream_command([program, "build", str(partial), address], output_type="both"):
                said.append(line.rstrip())
                report(Progress(f"{Path(program).name} builds SIF", text=said[-1]))
        except subprocess.CalledProcessError as error:
            raise explain_failure(program, "\n".join(said), partial) from error
    with partial.open("rb") as file:
        if file.read(_MAGIC_AT + len(_MAGIC))[_MAGIC_AT:] != _MAGIC:
            raise ImageError(f"{program} made no SIF file", fix="see what it says: apptainer build x.sif " + address)


@contextmanager
def _in_environment(known: credentials.Credentials | None) -> Iterator[None]:
    """Put credentials where the program reads them: spython gives it this process's environment."""
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


def _describe(
    name: str, source: ImageSource, partial: Path, final: Path, program: str, report: Report
) -> ImportManifest:
    digests = digest_file(partial, advance=ByteCounter(report, "computing digests", None).advance)
    return ImportManifest(
        reference=name,
        image_id=source.image_id,
        registry_digest=source.registry_digest,
        source=source.describe(),
        made_by=Path(program).name,
        format="sif",
        file=final.name,
        size=digests.size,
        sha256=digests.sha256,
        block_size=BLOCK_SIZE,
        blocks=digests.blocks,
        root_bytes=0,
        num_entries=0,
        labels=source.config.labels,
        sbom="",
        imported=time.time(),
        ftkit_version=__version__,
    )
