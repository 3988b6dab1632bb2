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
from ftkit.files import open_regular
from ftkit.images.oci.rootfs import Contents, ImageConfig, write_root
from ftkit.images.progress import ByteCounter

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ftkit.images.oci.rootfs import Entry
    from ftkit.images.progress import Report

ENROOT_OPTIONS: Final = "-comp zstd -Xcompression-level 3 -b 1M -exit-on-error"
"""Options for enroot, whose defaults take six times as long and write a larger file.

They replace enroot 4.1's defaults, such as `-exit-on-error`: without it mksquashfs replaces a file that it can't read
with an empty one, and ends with exit status 0.
"""

_SUPERBLOCK = struct.Struct("<4sIIIIHHHHHHQQQQQQQQ")
_MAGIC = b"hsqs"
_PIPE_BUFFER = 1 << 20
_F_SETPIPE_SZ = 1031
_FIRST_TAR_VERSION = (4, 5)


@dataclass(frozen=True)
class SquashfsTool:
    """A program that builds squashfs from a tar stream.

    With `clamps_times`, it needs the newest time of a file in SOURCE_DATE_EPOCH: without that, folders that are not in
    the stream, such as the root, get the current time.
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

    @property
    def summary(self) -> str:
        """Program and options, for the manifest."""
        return " ".join((self.program, *self.options))


def find_tool() -> SquashfsTool | None:
    """Return the best program on PATH, with options for zstd level 3, blocks of 1 MiB and all CPUs; None if none."""
    num_cpus = str(process.num_usable_cpus())
    if shutil.which("tar2sqfs"):
        return SquashfsTool(
            "tar2sqfs", ("--quiet", "--compressor", "zstd", "--comp-extra", "level=3", "--block-size", "1M",
                         "--no-xattr", "--no-skip", "--num-jobs", num_cpus, "--defaults", "mtime=0"),
        )  # fmt: skip
    if shutil.which("mksquashfs") and _reads_tar():
        return SquashfsTool(
            "mksquashfs", ("-tar", "-quiet", "-no-progress", "-comp", "zstd", "-Xcompression-level", "3", "-b", "1M",
                           "-no-xattrs", "-processors", num_cpus, "-mem", "512M", "-root-mode", "0755"),
            reads_from=("-",), clamps_times=True,
        )  # fmt: skip
    return None


def _reads_tar() -> bool:
    """Tell whether mksquashfs is 4.5 or newer: older ones, such as RHEL 9's, can't read a tar stream."""
    output = process.run(["mksquashfs", "-version"]).stdout
    found = re.search(r"version (\d+)\.(\d+)", output)
    return found is not None and (int(found[1]), int(found[2])) >= _FIRST_TAR_VERSION


def explain_failure(program: str, message: str, output: Path, num_bytes_in: int = 0) -> ImageError:
    """Convert the output of a program that writes an image file to an error.

    tar2sqfs reports "I/O error" for a full disk too, after it has removed its file. The disk was full if its free space
    is less than the bytes that were written.
    """
    last = " / ".join(message.strip().splitlines()[-3:]) or "no output"
    lower, free = message.lower(), shutil.disk_usage(output.parent).free
    if "no space left" in lower or ("i/o error" in lower and free < num_bytes_in):
        return disk_full(output.parent)
    return ImageError(f"{program} failed: {last}", fix="try again; see its output above")


def read_file(image: Path, path: str) -> bytes:
    """Return the content of a file in a squashfs image; empty if there is no such file, or no unsquashfs."""
    if not shutil.which("unsquashfs"):
        return b""
    done = process.run(["unsquashfs", "-cat", str(image), path], timeout_seconds=600)
    return done.stdout.encode() if done.returncode == 0 else b""


def disk_full(folder: Path) -> ImageError:
    """Return the error for a disk without space for an image."""
    free_mib = shutil.disk_usage(folder).free >> 20
    return ImageError(
        f"the disk is full: {folder} has no space for the image ({free_mib} MiB are free)",
        meaning="it needs about 45% of its unpacked size there, and from a registry also its compressed layers",
        fix="free space ('ftkit rm --unused' lists what can be removed), or put the workspace on another disk",
    )


def check_squashfs(path: Path) -> None:
    """Check that a file has a squashfs superblock, and is not shorter than its superblock says.

    Raises:
        ImageError: the file is something else, or truncated.
    """
    size = path.stat().st_size
    with open_regular(path) as file:
        head = file.read(_SUPERBLOCK.size)
    if len(head) < _SUPERBLOCK.size or not head.startswith(_MAGIC):
        raise ImageError(f"{path} is not a squashfs file", fix="import the image again: ftkit import NAME:TAG --force")
    bytes_used = _SUPERBLOCK.unpack(head)[12]
    if size < bytes_used:
        raise ImageError(
            f"{path} is truncated: it has {size} bytes, its superblock says {bytes_used}",
            meaning="copying it was interrupted, or the disk was full",
            fix="import the image again: ftkit import NAME:TAG --force",
        )


_WRITE_BUFFER = 1 << 20


@dataclass(frozen=True)
class MadeFile:
    """An image file: its contents, and the program and options that made it."""

    contents: Contents
    made_by: str


def build_squashfs(
    entries: Iterable[Entry], config: ImageConfig, partial: Path, *, root_bytes: int | None, report: Report
) -> MadeFile:
    """Build a squashfs file from the members of an image.

    The same members give the same bytes.

    Raises:
        PrerequisiteError: no program that builds squashfs is on PATH.
        ImageError: the source's data is truncated, the program failed, or the disk is full.
    """
    tool = find_tool()
    if tool is None:
        raise PrerequisiteError(
            "no program on this machine builds squashfs from a tar stream",
            meaning="looked for tar2sqfs (squashfs-tools-ng) and mksquashfs (squashfs-tools 4.5 or newer)",
            fix="apt-get install squashfs-tools-ng, or dnf install squashfs-tools-ng",
        )
    counter = ByteCounter(report, "building squashfs", root_bytes)
    contents: list[Contents] = []

    def feed(stdin: IO[bytes]) -> None:
        import fcntl  # noqa: PLC0415 - not on every system that can show a plan

        fcntl.fcntl(stdin.fileno(), _F_SETPIPE_SZ, _PIPE_BUFFER)
        with io.FileIO(stdin.fileno(), "w", closefd=False) as raw, io.BufferedWriter(raw, _WRITE_BUFFER) as sink:
            contents.append(write_root(entries, config, sink, counter.advance))

    environment = os.environ | {"SOURCE_DATE_EPOCH": str(config.created)} if tool.clamps_times else None
    done = process.run_with_input(tool.command(partial), feed, environment)
    if done.returncode != 0:
        raise explain_failure(tool.program, done.stderr, partial, counter.done)
    check_squashfs(partial)
    if not contents:
        raise ImageError(f"{tool.program} ended before it had read all of the image", fix="try again")
    return MadeFile(contents[0], tool.summary)
