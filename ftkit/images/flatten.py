"""The root file system of an image, read from its layers without unpacking them.

The topmost layer comes first: a path that was seen, or was deleted by a layer above, is passed over below.
So nothing is written twice, and each layer is read once.
"""

from __future__ import annotations

import gzip
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ftkit.errors import ImageError, PrerequisiteError
from ftkit.images.tar_members import FILE, FOLDER, LINK, Member, TarReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import IO

    from ftkit.images.root_filesystem import Entry

_DELETED: Final = b".wh."
_OPAQUE: Final = b".wh..wh..opq"
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_GZIP_MAGIC: Final = b"\x1f\x8b"


@dataclass
class _Above:
    """What the layers above have: paths, and what they hide of the layers below."""

    seen: set[bytes] = field(default_factory=set)
    not_folders: set[bytes] = field(default_factory=set)
    deleted: set[bytes] = field(default_factory=set)
    emptied: set[bytes] = field(default_factory=set)

    def hides(self, path: bytes) -> bool:
        if path in self.seen or path in self.deleted:
            return True
        parent = path
        while b"/" in parent:
            parent = parent.rpartition(b"/")[0]
            if parent in self.deleted or parent in self.emptied or parent in self.not_folders:
                return True
        return b"" in self.emptied


def flatten(layers: Sequence[Path]) -> Iterator[Entry]:
    """Yield the members of the whole; `layers` are the blobs, the lowest first."""
    above = _Above()
    for layer in reversed(layers):
        with opened_layer(layer) as stream:
            yield from _layer(TarReader(stream), layer, above)


def _layer(reader: TarReader, layer: Path, above: _Above) -> Iterator[Entry]:
    own = _Above()
    hidden: set[bytes] = set()
    for member in reader:
        folder, _, name = member.path.rpartition(b"/")
        if name == _OPAQUE:
            own.emptied.add(folder)
        elif name.startswith(_DELETED):
            own.deleted.add((folder + b"/" if folder else b"") + name.removeprefix(_DELETED))
        elif above.hides(member.path):
            if member.kind in (FILE, LINK):
                hidden.add(member.path)
        elif member.path not in own.seen:
            own.seen.add(member.path)
            if member.kind != FOLDER:
                own.not_folders.add(member.path)
            if member.kind == LINK and member.target in hidden:
                yield _as_file(member, layer)
                hidden.discard(member.path)
            else:
                yield member, reader.content()
    above.seen |= own.seen
    above.not_folders |= own.not_folders
    above.deleted |= own.deleted
    above.emptied |= own.emptied


def _as_file(link: Member, layer: Path) -> Entry:
    """Return a hard link as a file of its own: what it links to is hidden by a layer above."""
    with opened_layer(layer) as stream:
        reader = TarReader(stream)
        wanted = link.target
        for member in reader:
            if member.path == wanted and member.kind == FILE:
                data = b"".join(reader.content())
                return Member(link.path, FILE, member.mode, member.mtime, member.size), iter((data,))
    raise ImageError(f"a layer of the image is damaged: {link.path!r} links to {link.target!r}, which is not there")


@contextmanager
def opened_layer(path: Path) -> Iterator[IO[bytes]]:
    """Open a layer as a tar stream, whatever it is compressed with."""
    with path.open("rb") as file:
        magic = file.read(4)
        file.seek(0)
        if magic.startswith(_GZIP_MAGIC):
            with gzip.open(file, "rb") as stream:
                yield stream  # type: ignore[misc] # a GzipFile is readable bytes
        elif magic == _ZSTD_MAGIC:
            with _zstd(file) as stream:
                yield stream
        else:
            yield file


def _zstd(file: IO[bytes]) -> IO[bytes]:
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore] # noqa: PLC0415 - Python 3.14
    except ImportError:
        try:
            from backports import zstd  # type: ignore[import-not-found,unused-ignore,no-redef] # noqa: PLC0415
        except ImportError as error:
            raise PrerequisiteError(
                "the image's layers are compressed with zstd, which this Python can't read",
                fix="pip install backports.zstd, or import it with enroot or through docker",
            ) from error
    stream: IO[bytes] = zstd.open(file, "rb")
    return stream
