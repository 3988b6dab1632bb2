"""Build squashfs files from the members of an image, and check that a file is complete."""

from __future__ import annotations

import io
import os
import re
import shutil
import struct
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final

from ftkit import process
from ftkit.errors import ImageError, PrerequisiteError
from ftkit.images.oci.rootfs import Contents, ImageConfig, write_root
from ftkit.images.progress import ByteCounter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from ftkit.images.oci.rootfs import Entry
    from ftkit.images.progress import Report

ENROOT_OPTIONS: Final = "-comp zstd -Xcompression-level 3 -b 1M -exit-on-error"
"""What enroot is told: its defaults take six times as long for a larger file.

They replace the defaults of 4.1, of which `-exit-on-error` is one: without it mksquashfs makes an empty file of one
that it can't read, and says nothing by its exit status.
"""

_SUPERBLOCK = struct.Struct("<4sIIIIHHHHHHQQQQQQQQ")
_MAGIC = b"hsqs"
_PIPE_BUFFER = 1 << 20
_F_SETPIPE_SZ = 1031
_READS_TAR_FROM = (4, 5)


@dataclass(frozen=True)
class SquashfsTool:
    """A program that makes squashfs from a tar stream.

    Attributes:
        program: its name.
        options: what it is told.
        reads_from: how it is told to read standard input.
        clamps_times: whether it has to be told the newest time that a file may have, in SOURCE_DATE_EPOCH: of folders
            that no member names, as the root, it takes the time at which it runs.
    """

    program: str
    options: tuple[str, ...]
    reads_from: tuple[str, ...] = ()
    clamps_times: bool = False

    def command(self, output: Path) -> list[str]:
        """Return the command line."""
        if self.reads_from:
            return [self.program, *self.reads_from, str(output), *self.options]
        return [self.program, *self.options, str(output)]

    def describe(self) -> str:
        """Return what the manifest says of it."""
        return " ".join((self.program, *self.options))


def find_tool() -> SquashfsTool:
    """Return the best program on PATH; all of them get zstd level 3, blocks of 1 MiB and all processors.

    Raises:
        PrerequisiteError: there is none.
    """
    tool = _tool()
    if tool is None:
        raise PrerequisiteError(
            "there is no program here that makes squashfs from a tar stream",
            meaning="looked for tar2sqfs (squashfs-tools-ng) and mksquashfs (squashfs-tools 4.5 or newer)",
            fix="apt-get install squashfs-tools-ng, or dnf install squashfs-tools-ng",
        )
    return tool


def has_tool() -> bool:
    """Tell whether this machine has a program that makes squashfs from a tar stream."""
    return _tool() is not None


def _tool() -> SquashfsTool | None:
    processors = str(len(os.sched_getaffinity(0)))
    if shutil.which("tar2sqfs"):
        return SquashfsTool(
            "tar2sqfs", ("--quiet", "--compressor", "zstd", "--comp-extra", "level=3", "--block-size", "1M",
                         "--no-xattr", "--no-skip", "--num-jobs", processors, "--defaults", "mtime=0"),
        )  # fmt: skip
    if shutil.which("mksquashfs") and _reads_tar():
        return SquashfsTool(
            "mksquashfs", ("-tar", "-quiet", "-no-progress", "-comp", "zstd", "-Xcompression-level", "3", "-b", "1M",
                           "-no-xattrs", "-processors", processors, "-mem", "512M", "-root-mode", "0755"),
            reads_from=("-",), clamps_times=True,
        )  # fmt: skip
    return None


def _reads_tar() -> bool:
    """Tell whether mksquashfs is 4.5 or newer: older ones, as RHEL 9's, read no tar stream."""
    said = process.run(["mksquashfs", "-version"]).stdout
    found = re.search(r"version (\d+)\.(\d+)", said)
    return found is not None and (int(found[1]), int(found[2])) >= _READS_TAR_FROM


def run_tool(
    tool: SquashfsTool,
    feed: Callable[[IO[bytes]], None],
    output: Path,
    count_bytes: Callable[[], int],
    created: int,
) -> None:
    """Pack what `feed` writes into `output`; the same bytes each time.

    Args:
        tool: the program.
        feed: writes a tar stream of which no member is newer than `created`.
        output: the file.
        count_bytes: tells how much was written so far.
        created: when the image was made, in seconds since 1970.

    Raises:
        ImageError: the program failed; on a full disk, that.
    """

    def widened(entrance: IO[bytes]) -> None:
        import fcntl  # noqa: PLC0415 - not on every system that can show a plan

        fcntl.fcntl(entrance.fileno(), _F_SETPIPE_SZ, _PIPE_BUFFER)
        feed(entrance)

    environment = os.environ | {"SOURCE_DATE_EPOCH": str(created)} if tool.clamps_times else None
    done = process.run_with_input(tool.command(output), widened, environment)
    if done.returncode != 0:
        raise explain_failure(tool.program, done.stderr, output, count_bytes())
    check_squashfs(output)


def explain_failure(program: str, said: str, output: Path, num_bytes_in: int = 0) -> ImageError:
    """Turn the last words of a program that makes an image into an error.

    tar2sqfs says "I/O error" of a full disk too, and by then has removed its file: that there is less room than
    bytes went in tells it from a broken disk.
    """
    last = " / ".join(said.strip().splitlines()[-3:]) or "it said nothing"
    lower, free = said.lower(), shutil.disk_usage(output.parent).free
    if "no space left" in lower or ("i/o error" in lower and free < num_bytes_in):
        return disk_full(output.parent)
    return ImageError(f"{program} failed: {last}", fix="try again; its last words above say more")


def read_file(image: Path, path: str) -> bytes:
    """Return the content of a file in a squashfs image; empty if it has none, or nothing here can look into it."""
    if not shutil.which("unsquashfs"):
        return b""
    done = process.run(["unsquashfs", "-cat", str(image), path], timeout_seconds=600)
    return done.stdout.encode() if done.returncode == 0 else b""


def disk_full(folder: Path) -> ImageError:
    """Return the error for a disk that has no room for an image."""
    free_mib = shutil.disk_usage(folder).free >> 20
    return ImageError(
        f"the disk is full: the image has no room in {folder} ({free_mib} MiB are free)",
        meaning="it needs about 45 % of its unpacked size there, and from a registry its compressed layers as well",
        fix="make room ('ftkit gc' lists what may go), or put the workspace elsewhere",
    )


def check_squashfs(path: Path) -> None:
    """Check that a file begins as squashfs and is as long as it says itself.

    Raises:
        ImageError: it is not.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_SUPERBLOCK.size)
    if len(head) < _SUPERBLOCK.size or not head.startswith(_MAGIC):
        raise ImageError(f"{path} is no squashfs file", fix="import the image again: ftkit import NAME:TAG --force")
    bytes_used = _SUPERBLOCK.unpack(head)[12]
    if size < bytes_used:
        raise ImageError(
            f"{path} is truncated: it has {size} bytes and says itself that they should be {bytes_used}",
            meaning="a copy of it was interrupted, or the disk was full",
            fix="import the image again: ftkit import NAME:TAG --force",
        )


_WRITE_BUFFER = 1 << 20


@dataclass(frozen=True)
class MadeFile:
    """A squashfs file that was made: what is in it, and what made it."""

    contents: Contents
    made_by: str


def build_squashfs(
    entries: Iterable[Entry], config: ImageConfig, partial: Path, *, root_bytes: int | None, report: Report
) -> MadeFile:
    """Pack the members of an image into a squashfs file.

    Raises:
        PrerequisiteError: no program for it is on PATH.
        ImageError: the members broke off, or the disk is full.
    """
    tool = find_tool()
    counter = ByteCounter(report, "building squashfs", root_bytes)
    made: list[Contents] = []

    def feed(entrance: IO[bytes]) -> None:
        with io.FileIO(entrance.fileno(), "w", closefd=False) as raw, io.BufferedWriter(raw, _WRITE_BUFFER) as sink:
            made.append(write_root(entries, config, sink, counter.advance))

    run_tool(tool, feed, partial, lambda: counter.done, config.created)
    if not made:
        raise ImageError(f"{tool.program} ended before it had read the whole image", fix="try again")
    return MadeFile(made[0], tool.describe())
