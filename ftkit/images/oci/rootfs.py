"""Write the tar stream of a squashfs file from the members of an image.

The stream depends only on the image: it has no current time, no owners, and no trace of the exported container. Files
that enroot reads replace the image's own: /etc/environment has its variables, /etc/rc its working directory, entrypoint
and command, and /etc/fstab its volumes. /etc/rc.local does nothing. With the image's own files, enroot would run its
rc.local and mount its fstab, which no image expects.
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
_NOT_OF_THE_IMAGE = (b".dockerenv", *_REPLACED)
_RC_LOCAL = "# /etc/rc sources this file before the container's command starts.\n"
_FSTAB_ESCAPES = {ord(character): f"\\{ord(character):03o}" for character in " \t\n\\"}

Entry = tuple[Member, "Iterator[bytes]"]


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


@dataclass(frozen=True)
class Contents:
    """The contents of the stream; `left_out` has the paths of devices and pipes, which are not in it."""

    num_entries: int = 0
    num_bytes: int = 0
    sbom: bytes = b""
    left_out: tuple[str, ...] = ()


def write_root(
    entries: Iterable[Entry], config: ImageConfig, sink: Writable, advance: Callable[[int], None] = lambda _: None
) -> Contents:
    """Write the root file system of an image; `advance` is called with the size of each chunk of content."""
    root, required, left_out = _RootWriter(sink, config.created, advance), _RequiredFolders(config), []
    for member, chunks in entries:
        if not _is_of_image(member):
            continue
        if member.kind in _DEVICES_AND_PIPES:
            left_out.append(member.path.decode(errors="replace"))
            continue
        required.see(member)
        root.write(member, chunks)
    for path in required.missing():
        root.write(Member(path, FOLDER, 0o755), iter(()))
    texts = (environment_file(config), rc_file(config), _RC_LOCAL, fstab_file(config))
    for path, text in zip(_REPLACED, texts, strict=True):
        data = text.encode()
        root.write(Member(path, FILE, 0o644, config.created, len(data)), iter((data,)))
    write_end(sink)
    return Contents(root.num_entries, root.num_bytes, bytes(root.sbom), tuple(left_out))


class _RequiredFolders:
    """Folders that have to exist: /etc, the working directory and the volumes, with their parents."""

    def __init__(self, config: ImageConfig) -> None:
        folders = ("etc", config.working_directory, *config.volumes)
        self._paths = [parts for folder in folders if (parts := _parts(folder))]
        self._kinds: dict[bytes, bytes] = {b"/".join(parts[:end]): b"" for parts in self._paths
                                           for end in range(1, len(parts) + 1)}  # fmt: skip

    def see(self, member: Member) -> None:
        """Record that the image itself has a path, and of which kind."""
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
    """Return the components of a path; none if it leads out of the image."""
    parts = [part for part in folder.encode().split(b"/") if part not in (b"", b".")]
    return [] if b".." in parts else parts


def _is_of_image(member: Member) -> bool:
    path = member.path
    if not path or path in _NOT_OF_THE_IMAGE or path.startswith(b"dev/"):
        return False
    if member.kind not in (*_KEPT, *_DEVICES_AND_PIPES):
        raise ImageError(
            f"the image has a file of a type that ftkit does not support: {path!r} ({member.kind!r})",
            fix="import it with enroot",
        )
    return True


class _RootWriter:
    """Writes members; none is newer than the image, because docker creates newer ones for the export."""

    def __init__(self, sink: Writable, newest: int, advance: Callable[[int], None]) -> None:
        self._sink, self._newest, self._advance = sink, newest, advance
        self.num_entries = self.num_bytes = 0
        self.sbom = bytearray()

    def write(self, member: Member, chunks: Iterator[bytes]) -> None:
        """Write a member with its content."""
        mode, mtime = _usable_mode(member), min(member.mtime, self._newest)
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


def _usable_mode(member: Member) -> int:
    """Return the mode with the permissions that a file's owner needs: in the container the user is not root."""
    if member.kind == FOLDER:
        return member.mode | 0o700
    if member.kind == SYMLINK:
        return member.mode
    return member.mode | (0o500 if member.mode & 0o111 else 0o400)


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
