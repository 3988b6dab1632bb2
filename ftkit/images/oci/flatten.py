"""The root file system of an image, read from its layers without unpacking them.

The topmost layer is read first. A path that a higher layer has or deletes is skipped in the layers below. Each path is
written once. Each layer is read once, and once more if it has hard links to files that a higher layer hides.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ftkit.config.image_reference import Digest, shortened
from ftkit.errors import ImageError, PrerequisiteError
from ftkit.images.oci.tar import FILE, FOLDER, LINK, Member, TarReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ftkit.images.oci.tar import Readable
    from ftkit.images.squashfs import Entry

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
    """The paths of the layers above, and what these hide in the layers below.

    Attributes:
        seen: all their paths.
        not_folders: those of them that are not folders, and hide everything below the same path.
        deleted: paths that a whiteout deletes.
        emptied: folders with an opaque whiteout, which hides their earlier content.
    """

    seen: set[bytes] = field(default_factory=set)
    not_folders: set[bytes] = field(default_factory=set)
    deleted: set[bytes] = field(default_factory=set)
    emptied: set[bytes] = field(default_factory=set)

    def add(self, layer: _Above) -> None:
        """Add a layer that was read, and is above all layers that are not read yet."""
        self.seen |= layer.seen
        self.not_folders |= layer.not_folders
        self.deleted |= layer.deleted
        self.emptied |= layer.emptied

    def record_whiteout(self, path: bytes) -> bool:
        """Record what a whiteout hides in the layers below; tell whether `path` is one."""
        folder, _, name = path.rpartition(b"/")
        if name == _OPAQUE:
            self.emptied.add(folder)
        elif name.startswith(_DELETED):
            self.deleted.add((folder + b"/" if folder else b"") + name.removeprefix(_DELETED))
        else:
            return False
        return True

    def hides(self, path: bytes) -> bool:
        """Tell whether a path of a lower layer is not visible."""
        if path in self.seen or path in self.deleted:
            return True
        parent = path
        while b"/" in parent:
            parent = parent.rpartition(b"/")[0]
            if parent in self.deleted or parent in self.emptied or parent in self.not_folders:
                return True
        return b"" in self.emptied


def flatten(layers: Sequence[Layer]) -> Iterator[Entry]:
    """Yield the members of the root file system; the lowest of `layers` is the first.

    Raises:
        ImageError: a layer is damaged, or differs from the configuration. This is known only at its end: the caller
            must discard everything that was yielded if the iteration fails.
    """
    above = _Above()
    for layer in reversed(layers):
        with _opened(layer.blob) as stream:
            yield from _members(TarReader(stream), layer, above)
            stream.require(layer.diff_id)


@dataclass
class _HardLinks:
    """The hard links of a layer; some of their targets may be hidden by the layers above.

    Attributes:
        origins: for each link, the file that it leads to, through other links if need be.
        hidden: files and links that the layers above hide.
        orphans: for each hidden file, the visible links to it.
    """

    origins: dict[bytes, bytes] = field(default_factory=dict)
    hidden: set[bytes] = field(default_factory=set)
    orphans: dict[bytes, list[Member]] = field(default_factory=dict)

    def see(self, member: Member, *, is_hidden: bool) -> None:
        """Record where a link leads, and whether a file or link is hidden."""
        if member.kind == LINK:
            self.origins[member.path] = self.origins.get(member.target, member.target)
        if is_hidden and member.kind in (FILE, LINK):
            self.hidden.add(member.path)

    def resolve(self, link: Member) -> Member | None:
        """Return the link, to a visible file; None if its file is hidden: the link is recorded as an orphan.

        Raises:
            ImageError: it leads to itself.
        """
        origin = self.origins[link.path]
        if origin == link.path:
            raise ImageError(f"a layer of the image is damaged: {shortened(link.path)} is a hard link to itself")
        if origin in self.hidden:
            self.orphans.setdefault(origin, []).append(link)
            return None
        return replace(link, target=origin) if link.target in self.hidden else link


def _members(reader: TarReader, layer: Layer, above: _Above) -> Iterator[Entry]:
    current, links = _Above(), _HardLinks()
    for member in reader:
        if current.record_whiteout(member.path):
            continue
        is_hidden = above.hides(member.path)
        links.see(member, is_hidden=is_hidden)
        if is_hidden or member.path in current.seen:
            continue
        current.seen.add(member.path)
        if member.kind != FOLDER:
            current.not_folders.add(member.path)
        if member.kind != LINK:
            yield member, reader.content()
        elif resolved := links.resolve(member):
            yield resolved, iter(())
    if links.orphans:
        yield from _orphans(links.orphans, layer)
    above.add(current)


def _orphans(orphans: dict[bytes, list[Member]], layer: Layer) -> Iterator[Entry]:
    """Yield the links to files that a layer above hides: the first one becomes the file, the others link to it.

    The layer is read once more for all of them.
    """
    with _opened(layer.blob) as stream:
        reader = TarReader(stream)
        for member in reader:
            if member.kind == FILE and member.path in orphans:
                first, *others = orphans.pop(member.path)
                yield Member(first.path, FILE, member.mode, member.mtime, member.size), reader.content()
                for other in others:
                    yield replace(other, target=first.path), iter(())
    if orphans:
        target, links = next(iter(orphans.items()))
        raise ImageError(
            f"a layer of the image is damaged: {shortened(links[0].path)} links to "
            f"{shortened(target)}, which does not exist in it"
        )


class _LayerStream:
    """The tar stream of a layer; its digest is computed while it is read."""

    def __init__(self, stream: Readable, read_errors: tuple[type[Exception], ...]) -> None:
        self._stream = stream
        self._read_errors = read_errors
        self._running = hashlib.sha256()

    def read(self, size: int, /) -> bytes:
        """Read at most `size` bytes.

        Raises:
            ImageError: the compressed stream is truncated or damaged.
        """
        try:
            data = self._stream.read(size)
        except self._read_errors as error:
            raise ImageError(
                f"a layer of the image can't be unpacked: {error}",
                meaning="it was damaged before it was pushed: its digest is the one in the manifest",
                fix="build and push the image again",
            ) from error
        self._running.update(data)
        return data

    def require(self, diff_id: Digest) -> None:
        """Compare the digest of what was read with the configuration's.

        Raises:
            ImageError: they differ.
        """
        if self._running.hexdigest() != diff_id.hex:
            raise ImageError(
                f"a layer of the image is not the one that its configuration lists: it unpacks to "
                f"sha256:{self._running.hexdigest()}, not to {diff_id}",
                meaning="it was pushed by a broken program, or someone put other layers under the image's name",
                fix="don't use this image; push it again, and report it to the registry's administrator",
            )


@contextmanager
def _opened(path: Path) -> Iterator[_LayerStream]:
    """Open a layer as a tar stream, with any supported compression."""
    with path.open("rb") as file:
        magic = file.read(4)
        file.seek(0)
        if magic.startswith(_GZIP_MAGIC):
            with gzip.open(file, "rb") as stream:
                yield _LayerStream(stream, (EOFError, zlib.error, gzip.BadGzipFile))
        elif magic == _ZSTD_MAGIC:
            library = _zstd()
            with library.open(file, "rb") as unpacked:
                yield _LayerStream(unpacked, (EOFError, library.ZstdError))
        else:
            yield _LayerStream(file, ())


def _zstd() -> Any:
    """Return the library that reads zstd."""
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
    return zstd
