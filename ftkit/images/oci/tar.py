"""Members of tar streams, ten times faster than `tarfile`, and the root file system that an image's layers make.

A member has what an image needs: path, type, mode, time, size and link. Owners, extended attributes and device numbers
are left out, because images are unpacked without root.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import os
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from ftkit.config.image_reference import Digest, shortened
from ftkit.errors import ImageError, PrerequisiteError
from ftkit.images.oci.documents import untrusted

if TYPE_CHECKING:
    from io import BufferedIOBase

    from _typeshed import SupportsRead


BLOCK: Final = 512
CHUNK: Final = 1 << 20
_MAX_EXTENDED_HEADER: Final = 1 << 20
_MAX_DIGITS: Final = 18
_MAX_PATH: Final = 4096
_MAX_NAME: Final = 255
_BINARY, _NEGATIVE = 0x80, 0xFF
_ZEROS: Final = bytes(BLOCK)

FILE, LINK, SYMLINK, FOLDER = b"0", b"1", b"2", b"5"
_PLAIN_FILES = (b"0", b"\0", b"7")
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"


END: Final = _ZEROS * 2  # the end marker of a stream


@dataclass(frozen=True, slots=True)
class Member:
    """A file, link or folder; its path has no slash at either end and no `.`, `kind` is the header's type flag."""

    path: bytes
    kind: bytes
    mode: int = 0o644
    mtime: int = 0
    size: int = 0
    target: bytes = b""


Entry = tuple[Member, "Iterator[bytes]"]  # a member with its content


class TarReader:
    def __init__(self, source: SupportsRead[bytes]) -> None:
        self._source = source
        self._unread = 0
        self._padding = 0

    def __iter__(self) -> Iterator[Member]:
        """Yield the members; content that was not read is skipped. An ImageError if the stream is damaged."""
        path, target, size = b"", b"", -1
        while True:
            for _ in self.content():  # that was not read
                pass
            self._exactly(self._padding)
            header = self._exactly(BLOCK)
            if header == _ZEROS:
                while self._source.read(CHUNK):  # to the end, so that the writer does not get SIGPIPE
                    pass
                return
            kind = header[156:157]
            length = _number(header[124:136])
            if sum(header) - sum(header[148:156]) + 8 * 32 != _number(header[148:156]):
                raise _damaged("a header's checksum is wrong")
            if kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL):
                if length > _MAX_EXTENDED_HEADER:
                    raise _damaged(f"an extended header of {length} bytes")
                records = _extended(kind, self._exactly(length))
                self._padding = -length % BLOCK
                path = records.get(b"path", path)
                target = records.get(b"linkpath", target)
                size = _decimal(records[b"size"]) if b"size" in records else size
                continue
            member = _member(header, path, target, length if size < 0 else size)
            path, target, size = b"", b"", -1
            self._unread = member.size
            self._padding = -member.size % BLOCK
            yield member

    def content(self) -> Iterator[bytes]:
        while self._unread:
            chunk = self._source.read(min(CHUNK, self._unread))
            if not chunk:
                raise _damaged("it is truncated")
            self._unread -= len(chunk)
            yield chunk

    def _exactly(self, size: int) -> bytes:
        data = self._source.read(size) if size else b""
        while len(data) < size:
            more = self._source.read(size - len(data))
            if not more:
                raise _damaged("it is truncated")
            data += more
        return data


def write_member(sink: BufferedIOBase, member: Member) -> None:
    """Write the header of a member; the caller writes its content next, then `write_padding`."""
    entry = tarfile.TarInfo(os.fsdecode(member.path))
    entry.type, entry.mode, entry.mtime = member.kind, member.mode, member.mtime
    entry.size, entry.linkname = member.size, os.fsdecode(member.target)
    sink.write(entry.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))


def write_padding(sink: BufferedIOBase, size: int) -> None:
    """Fill the last block of content of `size` bytes with zeros."""
    if size % BLOCK:
        sink.write(_ZEROS[: -size % BLOCK])


def _member(header: bytes, path: bytes, target: bytes, size: int) -> Member:
    kind = header[156:157]
    if not path:
        path = _text(header[:100])
        if header[257:262] == b"ustar" and header[262:263] == b"\0" and (prefix := _text(header[345:500])):
            path = prefix + b"/" + path
    if kind in _PLAIN_FILES:
        kind = FOLDER if path.endswith(b"/") and kind != b"7" else FILE
    if kind != FILE:
        size = 0
    is_link = kind in (LINK, SYMLINK)
    target = (target or _text(header[157:257])) if is_link else b""
    target = _clean(target) if kind == LINK else target
    if is_link and (not target or b"\0" in target or len(target) >= _MAX_PATH):  # no system can create such a link
        raise _damaged(f"a link leads to '{shortened(target)}'")
    return Member(_clean(path), kind, _number(header[100:108]) & 0o7777, max(0, _number(header[136:148])), size, target)


def _clean(path: bytes) -> bytes:
    """Strip `./` and slashes; refuse a path that leads out of the image, or that no system can open."""
    if len(path) > _MAX_PATH:
        raise _damaged(f"a path of {len(path)} bytes")
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if max(map(len, parts), default=0) > _MAX_NAME:
        raise _damaged(f"a name of more than {_MAX_NAME} bytes")
    if b".." in parts or b"\0" in path:
        raise _damaged(f"a path is invalid, or leads out of the image: {shortened(path)}")
    return b"/".join(parts)


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _number(field: bytes) -> int:
    """Parse a number in a header: octal digits, or binary after a marker byte. Returns 0 for a negative one."""
    if field[0] in (_BINARY, _NEGATIVE):
        return int.from_bytes(field[1:], "big") if field[0] == _BINARY else 0
    text = field.strip(b"\0 ")
    if text.translate(None, b"01234567"):
        raise _damaged("a field is not a number")
    return int(text, 8) if text else 0


def _decimal(text: bytes) -> int:
    if not text.isdigit() or len(text) > _MAX_DIGITS:
        raise _damaged("a size is not a number")
    return int(text)


def _extended(kind: bytes, data: bytes) -> dict[bytes, bytes]:
    if kind in (_LONG_NAME, _LONG_LINK):
        return {b"path" if kind == _LONG_NAME else b"linkpath": data.rstrip(b"\0")}
    records: dict[bytes, bytes] = {}
    while data and kind != _PAX_GLOBAL:
        length, separator, _ = data.partition(b" ")
        end = _decimal(length)
        if not separator or not len(length) < end <= len(data) or data[end - 1 : end] != b"\n":
            raise _damaged("an extended header is truncated")
        key, _, value = data[len(length) + 1 : end - 1].partition(b"=")
        records[key] = value
        data = data[end:]
        if key.startswith(b"GNU.sparse."):
            raise ImageError("the image's tar stream has a sparse file", fix="import it with enroot")
    return records


def _damaged(how: str) -> ImageError:
    return ImageError(
        f"the image's tar stream is damaged: {how}",
        meaning="the sender was stopped, it was corrupted in transit, or it was written by a broken program",
        fix="try again; build and push the image again if the error persists",
    )


# --- Layers --------------------------------------------------------------------------------------

_DELETED: Final = b".wh."
_OPAQUE: Final = b".wh..wh..opq"
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_GZIP_MAGIC: Final = b"\x1f\x8b"


@dataclass(frozen=True)
class Layer:
    """A layer: its blob, and the digest of its tar stream according to the image's configuration."""

    blob: Path
    diff_id: Digest


@dataclass
class _Above:
    """What the layers above hide: paths, and trees, of which everything below the path is hidden."""

    paths: set[bytes] = field(default_factory=set)
    trees: set[bytes] = field(default_factory=set)

    def record_whiteout(self, path: bytes) -> bool:
        """Record what a whiteout hides in the layers below; tell whether `path` is one."""
        folder, _, name = path.rpartition(b"/")
        if name == _OPAQUE:  # hides the earlier content of its folder
            self.trees.add(folder)
        elif name.startswith(_DELETED):
            deleted = (folder + b"/" if folder else b"") + name.removeprefix(_DELETED)
            self.paths.add(deleted)
            self.trees.add(deleted)
        return name.startswith(_DELETED)

    def hides(self, path: bytes) -> bool:
        if path in self.paths or b"" in self.trees:
            return True
        parent = path
        while b"/" in parent:
            parent = parent.rpartition(b"/")[0]
            if parent in self.trees:
                return True
        return False


def flatten(layers: Sequence[Layer]) -> Iterator[Entry]:
    """Yield the members of the root file system; the lowest of `layers` is the first. Nothing is unpacked.

    The topmost layer is read first. A path that a higher layer has or deletes is skipped in the layers below. Each path
    is yielded once. Each layer is read once, and once more if it has hard links to files that a higher layer hides.

    Raises `ImageError` if a layer is damaged, or differs from the configuration. This is known only at its end: the
    caller must discard everything that was yielded if the iteration fails.
    """
    above = _Above()
    for layer in reversed(layers):
        with _opened(layer.blob) as stream:
            yield from _visible(TarReader(stream), layer, above)
            stream.require(layer.diff_id)


def _visible(reader: TarReader, layer: Layer, above: _Above) -> Iterator[Entry]:
    seen, here = set[bytes](), _Above()
    origins: dict[bytes, bytes] = {}  # for each hard link, its file
    hidden = set[bytes]()
    orphans: dict[bytes, list[Member]] = {}  # for each hidden file, the visible links to it
    for member in reader:
        if here.record_whiteout(member.path):
            continue
        is_hidden = above.hides(member.path)
        if member.kind == LINK:
            origins[member.path] = _origin(member, origins)
        if is_hidden and member.kind in (FILE, LINK):
            hidden.add(member.path)
        if is_hidden or member.path in seen:
            continue
        seen.add(member.path)
        if member.kind != FOLDER:
            here.trees.add(member.path)
        if member.kind != LINK:
            yield member, reader.content()
            continue
        origin = origins[member.path]
        if origin in hidden:
            orphans.setdefault(origin, []).append(member)
        else:
            yield replace(member, target=origin) if member.target in hidden else member, iter(())
    if orphans:
        yield from _with_content(orphans, layer)
    above.paths |= here.paths | seen
    above.trees |= here.trees


def _origin(link: Member, origins: dict[bytes, bytes]) -> bytes:
    origin = origins.get(link.target, link.target)  # through other links if need be
    if origin == link.path:
        raise untrusted(f"a layer of the image is damaged: {shortened(origin)} is a hard link to itself")
    return origin


def _with_content(orphans: dict[bytes, list[Member]], layer: Layer) -> Iterator[Entry]:
    """The layer is read again: the first link to each hidden file becomes the file, the others link to it."""
    with _opened(layer.blob) as stream:
        reader = TarReader(stream)
        for member in reader:
            if member.kind == FILE and member.path in orphans:
                first, *others = orphans.pop(member.path)
                yield replace(member, path=first.path), reader.content()
                for other in others:
                    yield replace(other, target=first.path), iter(())
    for target, links in orphans.items():
        what = f"{shortened(links[0].path)} links to {shortened(target)}, which does not exist in it"
        raise untrusted(f"a layer of the image is damaged: {what}")


class _LayerStream:
    def __init__(self, stream: SupportsRead[bytes], read_errors: tuple[type[Exception], ...]) -> None:
        self._stream = stream
        self._read_errors = read_errors
        self._running = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        try:
            data = self._stream.read(size)
        except self._read_errors as error:
            raise untrusted(f"a layer of the image can't be unpacked: {error}") from error
        self._running.update(data)
        return data

    def require(self, diff_id: Digest) -> None:
        found = self._running.hexdigest()
        if found != diff_id.hex:
            what = f"it unpacks to sha256:{found}, not to {diff_id}"
            raise untrusted(f"a layer of the image is not the one that its configuration lists: {what}")


@contextmanager
def _opened(path: Path) -> Iterator[_LayerStream]:
    with path.open("rb") as file:
        magic = file.read(4)
        file.seek(0)
        if magic.startswith(_GZIP_MAGIC):
            with gzip.open(file, "rb") as stream:
                yield _LayerStream(stream, (EOFError, zlib.error, gzip.BadGzipFile))
        elif magic == _ZSTD_MAGIC:
            library = _import_zstd()
            with library.open(file, "rb") as unpacked:
                yield _LayerStream(unpacked, (EOFError, library.ZstdError))
        else:
            yield _LayerStream(file, ())


def _import_zstd() -> ModuleType:
    for name in ("compression.zstd", "backports.zstd"):  # the first one from Python 3.14 on
        with suppress(ImportError):
            return importlib.import_module(name)
    what = "the image's layers are compressed with zstd, which this Python can't read"
    raise PrerequisiteError(what, fix="pip install backports.zstd, or import it with enroot or through docker")
