"""Make a squashfs file from the members of an image, in one stream."""

from __future__ import annotations

import io
import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

from ftkit.errors import ImageError
from ftkit.images import squashfs
from ftkit.images.oci.rootfs import Contents, ImageConfig, write_root
from ftkit.images.progress import Progress, Report

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ftkit.images.oci.rootfs import Entry

_WRITE_BUFFER = 1 << 20
_SECONDS_BETWEEN_REPORTS = 0.1


@dataclass(frozen=True)
class Made:
    """A squashfs file that was made: what is in it, and what made it."""

    contents: Contents
    made_by: str


@dataclass
class ByteCounter:
    """Reports bytes, a few times a second."""

    report: Report
    stage: str
    total: int | None
    done: int = 0
    shown: float = field(default=0.0)

    def advance(self, num_bytes: int) -> None:
        """Count."""
        self.done += num_bytes
        now = time.monotonic()
        if now - self.shown > _SECONDS_BETWEEN_REPORTS:
            self.shown = now
            self.report(Progress(self.stage, done=self.done, total=self.total))


def pack_entries(
    entries: Iterable[Entry], config: ImageConfig, partial: Path, *, root_bytes: int | None, report: Report
) -> Made:
    """Pack the members of an image into a squashfs file.

    Raises:
        PrerequisiteError: no program for it is on PATH.
        ImageError: the members broke off, or the disk is full.
    """
    packer = squashfs.find_packer()
    counter = ByteCounter(report, "packing into squashfs", root_bytes)
    made: list[Contents] = []

    def feed(entrance: IO[bytes]) -> None:
        with io.FileIO(entrance.fileno(), "w", closefd=False) as raw, io.BufferedWriter(raw, _WRITE_BUFFER) as sink:
            made.append(write_root(entries, config, sink, counter.advance))

    squashfs.pack(packer, feed, partial, lambda: counter.done, config.created)
    if not made:
        raise ImageError(f"{packer.program} ended before it had read the whole image", fix="try again")
    return Made(made[0], packer.describe())
