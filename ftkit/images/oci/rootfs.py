"""Write the tar stream of a squashfs file from the members of an image.

The stream is a function of the image alone: no current time, no owner, no trace of the exported container. It has the
files that enroot reads, instead of the image's own: its environment in
/etc/environment, its working directory, entrypoint and command in /etc/rc, its volumes in /etc/fstab, and an
/etc/rc.local that does nothing: enroot runs the one and mounts the other, which no image expects.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ftkit.errors import ImageError
from ftkit.images.oci.tar import (
    FILE,
    FOLDER,
    LINK,
    SYMLINK,
    Member,
    write_end,
    write_member,
    write_padding,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ftkit.images.oci.tar import Writable

SBOM_PATH: Final = "opt/ftkit/sbom.cdx.json"
"""Where the Dockerfile writes the image's SBOM."""

_MAX_SBOM_BYTES = 64 << 20
_KEPT = (FILE, LINK, SYMLINK, FOLDER)
_DEVICES_AND_PIPES = (b"3", b"4", b"6")
_REPLACED = (b"etc/environment", b"etc/rc", b"etc/rc.local", b"etc/fstab")
_OF_THE_CONTAINER = (b".dockerenv", *_REPLACED)
_RC_LOCAL = "# /etc/rc sources this file before the container's command starts.\n"
_FSTAB_ESCAPES = {ord(character): f"\\{ord(character):03o}" for character in " \t\n\\"}

Entry = tuple[Member, "Iterator[bytes]"]


@dataclass(frozen=True)
class ImageConfig:
    """How an image is run."""

    environment: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    working_directory: str = ""
    volumes: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    created: int = 0


@dataclass(frozen=True)
class Contents:
    """Contents of the stream; devices and pipes are left out of it."""

    num_entries: int = 0
    num_bytes: int = 0
    sbom: bytes = b""
    left_out: tuple[str, ...] = ()


def write_root(
    entries: Iterable[Entry], config: ImageConfig, sink: Writable, advance: Callable[[int], None] = lambda _: None
) -> Contents:
    """Write the root file system of an image; `advance` is called with the bytes of content."""
    root, wanted, left_out = _RootWriter(sink, config.created, advance), _WantedFolders(config), []
    for member, chunks in entries:
        if not _belongs(member):
            continue
        if member.kind in _DEVICES_AND_PIPES:
            left_out.append(member.path.decode(errors="replace"))
            continue
        wanted.see(member)
        root.write(member, chunks)
    for path in wanted.missing():
        root.write(Member(path, FOLDER, 0o755), iter(()))
    texts = (environment_file(config), rc_file(config), _RC_LOCAL, fstab_file(config))
    for path, text in zip(_REPLACED, texts, strict=True):
        data = text.encode()
        root.write(Member(path, FILE, 0o644, config.created, len(data)), iter((data,)))
    write_end(sink)
    return Contents(root.num_entries, root.num_bytes, bytes(root.sbom), tuple(left_out))


class _WantedFolders:
    """Folders that have to be there: /etc, the working directory and the volumes, with all above them."""

    def __init__(self, config: ImageConfig) -> None:
        folders = ("etc", config.working_directory, *config.volumes)
        self._paths = [parts for folder in folders if (parts := _parts(folder))]
        self._kinds: dict[bytes, bytes] = {b"/".join(parts[:end]): b"" for parts in self._paths
                                           for end in range(1, len(parts) + 1)}  # fmt: skip

    def see(self, member: Member) -> None:
        """Record the folders that the image itself has."""
        if member.path in self._kinds:
            self._kinds[member.path] = member.kind

    def missing(self) -> Iterator[bytes]:
        """Yield each folder that no member created, except below a link or a file."""
        for parts in self._paths:
            for end in range(1, len(parts) + 1):
                path = b"/".join(parts[:end])
                if not self._kinds[path]:
                    self._kinds[path] = FOLDER
                    yield path
                elif self._kinds[path] != FOLDER:
                    break


def _parts(folder: str) -> list[bytes]:
    """Return the names that a path is made of; none if it leads out of the image."""
    parts = [part for part in folder.encode().split(b"/") if part not in (b"", b".")]
    return [] if b".." in parts else parts


def _belongs(member: Member) -> bool:
    path = member.path
    if not path or path in _OF_THE_CONTAINER or path.startswith(b"dev/"):
        return False
    if member.kind not in (*_KEPT, *_DEVICES_AND_PIPES):
        raise ImageError(
            f"the image has a file of a kind that ftkit does not know: {path!r} ({member.kind!r})",
            fix="import it with enroot",
        )
    return True


class _RootWriter:
    """Writes members, no newer than the image itself: docker made newer ones for the export."""

    def __init__(self, sink: Writable, newest: int, advance: Callable[[int], None]) -> None:
        self._sink, self._newest, self._advance = sink, newest, advance
        self.num_entries = self.num_bytes = 0
        self.sbom = bytearray()

    def write(self, member: Member, chunks: Iterator[bytes]) -> None:
        """Write a member with its content."""
        mode, mtime = _owner_can(member), min(member.mtime, self._newest)
        write_member(self._sink, Member(member.path, member.kind, mode, mtime, member.size, member.target))
        keeps = member.path == SBOM_PATH.encode() and member.size <= _MAX_SBOM_BYTES
        for chunk in chunks:
            self._sink.write(chunk)
            self._advance(len(chunk))
            if keeps:
                self.sbom += chunk
        write_padding(self._sink, member.size)
        self.num_entries += 1
        self.num_bytes += member.size


def _owner_can(member: Member) -> int:
    """Return the mode with the permissions that the owner needs: in the container the user is not root."""
    if member.kind == FOLDER:
        return member.mode | 0o700
    if member.kind == SYMLINK:
        return member.mode
    return member.mode | (0o500 if member.mode & 0o111 else 0o400)


def fstab_file(config: ImageConfig) -> str:
    """Return enroot's mounts: each volume over itself, so that it is a separate file system as with docker."""
    paths = [b"/".join(parts).decode() for volume in config.volumes if (parts := _parts(volume))]
    volumes = [f"/{path}".translate(_FSTAB_ESCAPES) for path in paths]
    return "".join(
        f"${{ENROOT_ROOTFS}}{volume} {volume} none x-create=dir,bind,rw,nosuid,nodev\n" for volume in volumes
    )


def environment_file(config: ImageConfig) -> str:
    """Return the image's variables, one `NAME=value` a line. The file can't hold a value with a line break."""
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
