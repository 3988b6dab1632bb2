"""A model's weight files: the tensors in them, from the headers of safetensors."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.errors import NotFoundError
from ftkit.files import MAX_JSON_BYTES, load_json, open_regular, read_small

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


CONFIG_FILE = "config.json"
WEIGHTS_INDEX = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
LENGTH_BYTES = 8
"""Bytes of the little-endian length before the header of a safetensors file."""
_MAX_HEADER_BYTES = 100_000_000
"""Limit of the format."""
_MAX_NAME = 255
"""Longest name of a file, in bytes."""
WRAPPED = "model.language_model."
"""Prefix of the text model in most multimodal models' classes."""

_TEXT_PREFIXES = {
    "language_model.model.": "model.",  # in files on the hub
    "language_model.lm_head.": "lm_head.",
    WRAPPED: "model.",  # in the class, and in files of some versions of transformers
    "model.text_model.": "model.",  # in Idefics 2 and 3, and SmolVLM
}


def text_name(stored: str) -> str:
    """Return the text model's name of a tensor in the files; other tensors keep their name."""
    for prefix, own in _TEXT_PREFIXES.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return stored


def stored_names(file: Path) -> set[str]:
    """Return the names of the tensors in a file of safetensors; empty if the file is missing or damaged."""
    with suppress(*UNREADABLE):
        return {*stored_tensors(file)}
    return set()


def stored_dtypes(file: Path) -> set[str]:
    """Return the dtypes of a file of safetensors, by the format's names; empty if the file is damaged."""
    with suppress(*UNREADABLE):
        return {tensor.kind[0] for tensor in stored_tensors(file).values()}
    return set()


def weight_files(folder: Path) -> list[str]:
    """Return the files with a model's weights: one, or those in the index; a damaged index raises any error.

    As in transformers, an index beside the one file has no effect: programs that save into a folder may leave it there.
    """
    if (folder / WEIGHTS_FILE).is_file() or not (folder / WEIGHTS_INDEX).is_file():
        return [WEIGHTS_FILE]
    return sorted(set(read_index(folder).values()))


def read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, from the index; a damaged one raises one of `UNREADABLE`.

    Raises:
        NotFoundError: it lists a file outside the folder, or one that can't exist.
    """
    places: dict[str, str] = load_json(read_small(folder / WEIGHTS_INDEX, MAX_JSON_BYTES))["weight_map"]
    for file in set(places.values()):
        parts = Path(file).parts
        if Path(file).is_absolute() or ".." in parts or "\0" in file or any(len(part) > _MAX_NAME for part in parts):
            raise NotFoundError(
                f"model.weights: {folder / WEIGHTS_INDEX} lists {file[:80]!r}, which is no file of this folder",
                meaning="the index was damaged or edited; ftkit reads only files within a model's folder",
                fix="copy or download the model again",
            )
    return places


def is_complete(path: Path) -> bool:
    """Return whether a safetensors file is as long as its header says: the header's length, the header, the tensors."""
    try:
        end = max((tensor.end for tensor in stored_tensors(path).values()), default=None)
        if end is None:
            with open_regular(path) as file:
                end = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")
        return path.stat().st_size == end
    except UNREADABLE:
        return False


UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError)
"""Exceptions that damaged safetensors files, and damaged indexes, raise."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is in a file of safetensors: bytes `begin` to `end`."""

    path: Path
    kind: tuple[str, tuple[int, ...]]
    begin: int
    end: int

    def equals(self, other: StoredTensor) -> bool:
        """Compare dtype, shape and bytes."""
        return self.kind == other.kind and all(map(eq, self._chunks(), other._chunks()))

    def _chunks(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            file.seek(self.begin)
            for done in range(self.begin, self.end, 2**24):
                yield file.read(min(2**24, self.end - done))


def tensors_of_model(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a model's weight files, from their headers; damaged files raise any error."""
    return {name: tensor for file in weight_files(folder) for name, tensor in stored_tensors(folder / file).items()}


def stored_tensors(path: Path) -> Mapping[str, StoredTensor]:
    """Return the tensors of a file of safetensors, from its header, which is read again only if the file changed."""
    seen = path.stat()
    return _read_header(path, (seen.st_ino, seen.st_size, seen.st_mtime_ns))


@lru_cache(maxsize=256)  # files of the largest models
def _read_header(path: Path, _: tuple[int, int, int]) -> Mapping[str, StoredTensor]:
    with open_regular(path) as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = load_json(file.read(min(length, _MAX_HEADER_BYTES)))
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(
            path,
            (entry["dtype"], tuple(entry["shape"])),
            *(LENGTH_BYTES + length + offset for offset in entry["data_offsets"]),
        )
        for name, entry in header.items()
    }
