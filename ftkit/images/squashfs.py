"""Build squashfs files from the members of an image, and check that a file is complete.

A file is built from a tar stream that depends only on the image: no current time, no owners, and no trace of the
exported container. Files that enroot reads replace the image's own: /etc/environment has the image's variables, /etc/rc
its working directory, entrypoint and command, and /etc/fstab its volumes; /etc/rc.local does nothing. Otherwise enroot
would run the image's rc.local and mount its fstab, which no image expects.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
import shlex
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Final

from ftkit import process
from ftkit.errors import ImageError, PrerequisiteError
from ftkit.files import open_regular
from ftkit.images.events import ByteCounter, Report
from ftkit.images.oci.tar import END, FILE, FOLDER, LINK, SYMLINK, Entry, Member, write_member, write_padding

ENROOT_OPTIONS: Final = "-comp zstd -Xcompression-level 3 -b 1M -exit-on-error"
"""Options for enroot, whose defaults take six times as long and write a larger file.

They replace enroot 4.1's defaults, such as `-exit-on-error`: without it mksquashfs replaces a file that it can't read
with an empty one, and ends with exit status 0.
"""

_SUPERBLOCK = struct.Struct("<4sIIIIHHHHHHQQQQQQQQ")
_MAGIC = b"hsqs"
_BUFFER = 1 << 20


@dataclass(frozen=True)
class SquashfsTool:
    """A program that builds squashfs from a tar stream, with its options before and after the output's path."""

    before: tuple[str, ...]
    after: tuple[str, ...] = ()
    clamps_times: bool = False  # folders not in the stream, as the root, get the time SOURCE_DATE_EPOCH


def find_tool() -> SquashfsTool | None:
    """Return the best program on PATH; mksquashfs before 4.5, such as RHEL 9's, can't read a tar stream."""
    num_cpus = str(process.num_usable_cpus())
    if shutil.which("tar2sqfs"):
        options = "--quiet --compressor zstd --comp-extra level=3 --block-size 1M --no-xattr --no-skip"
        return SquashfsTool(("tar2sqfs", *options.split(), "--num-jobs", num_cpus, "--defaults", "mtime=0"))
    if shutil.which("mksquashfs"):
        found = re.search(r"version (\d+)\.(\d+)", process.run(["mksquashfs", "-version"]).stdout)
        if found and (int(found[1]), int(found[2])) >= (4, 5):
            options = "-tar -quiet -no-progress -comp zstd -Xcompression-level 3 -b 1M -no-xattrs -mem 512M"
            after = (*options.split(), "-root-mode", "0755", "-processors", num_cpus)
            return SquashfsTool(("mksquashfs", "-"), after, clamps_times=True)
    return None


def explain_failure(program: str, message: str, output: Path, num_bytes_in: int = 0) -> ImageError:
    last = " / ".join(message.strip().splitlines()[-3:]) or "no output"
    lower, free = message.lower(), shutil.disk_usage(output.parent).free
    # tar2sqfs reports "I/O error" for a full disk too, after it has removed its file.
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
    free_mib = shutil.disk_usage(folder).free >> 20
    return ImageError(
        f"the disk is full: {folder} has no space for the image ({free_mib} MiB are free)",
        meaning="it needs about 45% of its unpacked size there, and from a registry also its compressed layers",
        fix="free space ('ftkit rm --unused' lists what can be removed), or put the workspace on another disk",
    )


def check_squashfs(path: Path) -> None:
    """Check that a file has a squashfs superblock and is not truncated."""
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


@dataclass(frozen=True)
class MadeFile:
    """A new image file: the program that made it, its SBOM if known, and the devices and pipes in `left_out`."""

    made_by: str = ""
    sbom: bytes = b""
    left_out: tuple[str, ...] = ()


def build_squashfs(
    entries: Iterable[Entry], config: ImageConfig, partial: Path, *, root_bytes: int | None, report: Report
) -> MadeFile:
    """Build a squashfs file from the members of an image; the same members give the same bytes."""
    tool = find_tool()
    if tool is None:
        raise PrerequisiteError(
            "no program on this machine builds squashfs from a tar stream",
            meaning="looked for tar2sqfs (squashfs-tools-ng) and mksquashfs (squashfs-tools 4.5 or newer)",
            fix="apt-get install squashfs-tools-ng, or dnf install squashfs-tools-ng",
        )
    counter = ByteCounter(report, "building squashfs", root_bytes)
    made: list[MadeFile] = []

    def feed(stdin: IO[bytes]) -> None:
        fcntl.fcntl(stdin.fileno(), fcntl.F_SETPIPE_SZ, _BUFFER)
        with io.FileIO(stdin.fileno(), "w", closefd=False) as raw, io.BufferedWriter(raw, _BUFFER) as sink:
            made.append(write_root(entries, config, sink, counter.advance))

    environment = os.environ | {"SOURCE_DATE_EPOCH": str(config.created)} if tool.clamps_times else None
    done = process.run_with_input([*tool.before, str(partial), *tool.after], feed, environment)
    program = tool.before[0]
    if done.returncode != 0:
        raise explain_failure(program, done.stderr, partial, counter.done)
    check_squashfs(partial)
    if not made:
        raise ImageError(f"{program} ended before it had read all of the image", fix="try again")
    return replace(made[0], made_by=" ".join((*tool.before, *tool.after)))


SBOM_PATH: Final = "opt/ftkit/sbom.cdx.json"  # where the Dockerfile writes the image's SBOM

_MAX_SBOM_BYTES = 64 << 20
_NEEDED = {FOLDER: 7, SYMLINK: 0}
_DEVICES_AND_PIPES = (b"3", b"4", b"6")
_REPLACED = (b"etc/environment", b"etc/rc", b"etc/rc.local", b"etc/fstab")
_NOT_OF_THE_IMAGE = (b".dockerenv", *_REPLACED)
_RC_LOCAL = "# /etc/rc sources this file before the container's command starts.\n"
_FSTAB_ESCAPES = {ord(character): f"\\{ord(character):03o}" for character in " \t\n\\"}


@dataclass(frozen=True)
class ImageConfig:
    """How an image is run, in OCI's terms; variables are `NAME=value`, and `created` is in seconds since 1970."""

    environment: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    working_directory: str = ""
    volumes: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    created: int = 0


def write_root(
    entries: Iterable[Entry],
    config: ImageConfig,
    sink: io.BufferedIOBase,
    advance: Callable[[int], None] = lambda _: None,
) -> MadeFile:
    """Write the root file system of an image; `advance` is called with the size of each chunk of content.

    No member is newer than the image, because docker creates newer ones for the export.
    """
    sbom = bytearray()

    def write(member: Member, chunks: Iterable[bytes] = ()) -> None:
        # With the permissions that the owner needs, because in the container the user is not root.
        needed = 0o100 * _NEEDED.get(member.kind, 5 if member.mode & 0o111 else 4)
        write_member(sink, replace(member, mode=member.mode | needed, mtime=min(member.mtime, config.created)))
        keeps = member.path == SBOM_PATH.encode() and member.size <= _MAX_SBOM_BYTES
        for chunk in chunks:
            sink.write(chunk)
            advance(len(chunk))
            if keeps:
                sbom.extend(chunk)
        write_padding(sink, member.size)

    # Folders that have to exist, and for each of their parts, of which kind the image's own member is.
    folders = [parts for folder in ("etc", config.working_directory, *config.volumes) if (parts := _parts(folder))]
    kinds = {b"/".join(parts[:end]): b"" for parts in folders for end in range(1, len(parts) + 1)}
    left_out: list[str] = []
    for member, chunks in _select(entries, left_out):
        if member.path in kinds:
            kinds[member.path] = member.kind
        write(member, chunks)
    for path, kind in kinds.items():  # create what is missing, except below a link or a file
        if not kind and kinds.get(path.rpartition(b"/")[0], FOLDER) == FOLDER:
            kinds[path] = FOLDER
            write(Member(path, FOLDER, 0o755))
    texts = (environment_file(config), rc_file(config), _RC_LOCAL, fstab_file(config))
    for path, text in zip(_REPLACED, texts, strict=True):
        write(Member(path, FILE, 0o644, config.created, len(text.encode())), (text.encode(),))
    sink.write(END)
    return MadeFile(sbom=bytes(sbom), left_out=tuple(left_out))


def _select(entries: Iterable[Entry], left_out: list[str]) -> Iterator[Entry]:
    """Yield members of the image, without those that docker's export adds; `left_out` gets those that need root."""
    for member, chunks in entries:
        path = member.path
        if not path or path in _NOT_OF_THE_IMAGE or path.startswith(b"dev/"):
            continue
        if member.kind in _DEVICES_AND_PIPES:
            left_out.append(path.decode(errors="replace"))
        elif member.kind in (FILE, LINK, SYMLINK, FOLDER):
            yield member, chunks
        else:
            what = f"the image has a file of a type that ftkit does not support: {path!r} ({member.kind!r})"
            raise ImageError(what, fix="import it with enroot")


def _parts(folder: str) -> list[bytes]:
    """Return the components of a path; empty if it leads out of the image."""
    parts = [part for part in folder.encode().split(b"/") if part not in (b"", b".")]
    return [] if b".." in parts else parts


def fstab_file(config: ImageConfig) -> str:
    """Return enroot's mounts: each volume is bind-mounted over itself, as a separate file system like docker's."""
    paths = [b"/".join(parts).decode() for volume in config.volumes if (parts := _parts(volume))]
    volumes = [f"/{path}".translate(_FSTAB_ESCAPES) for path in paths]
    return "".join(
        f"${{ENROOT_ROOTFS}}{volume} {volume} none x-create=dir,bind,rw,nosuid,nodev\n" for volume in volumes
    )


def environment_file(config: ImageConfig) -> str:
    """Return the image's variables, one `NAME=value` per line. Values with a line break are left out."""
    return "".join(f"{pair}\n" for pair in config.environment if "\n" not in pair)


def rc_file(config: ImageConfig) -> str:
    """Return the script that enroot sources to start the image: its arguments are the user's command."""
    lines = ["# " + " ".join(f"{key} {value}".split()) for key, value in sorted(config.labels.items())]
    if config.working_directory:
        folder = shlex.quote(config.working_directory)
        lines += [f"mkdir -p {folder} 2>/dev/null", f"cd {folder} && unset OLDPWD || exit 1"]
    start = " ".join(["exec", *map(shlex.quote, config.entrypoint)])
    command = " ".join(map(shlex.quote, config.command or (() if config.entrypoint else ("/bin/sh",))))
    lines += [
        "if [ -s /etc/rc.local ]; then",
        "    . /etc/rc.local",
        "fi",
        "if [ $# -gt 0 ]; then",
        f'    {start} "$@"',
        "else",
        f"    {start} {command}".rstrip(),
        "fi",
    ]
    return "\n".join(lines) + "\n"
