"""Prepared data on disk: memory-mapped arrays, written as a stream and immutable afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ftkit.data.packing import IGNORED, TRAINED, DocumentBatch
from ftkit.data.pictures import Arrays, PictureInputs, from_record
from ftkit.data.readers import read_json_lines
from ftkit.errors import DataError
from ftkit.files import DamagedFileError, files_in, publish, read_json, remove, sha256_of, write_json
from ftkit.paths import is_path
from ftkit.planning.layout import DataLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ftkit.data.rows import Row


@dataclass(frozen=True)
class SourceStats:
    """Totals of one source: rows; rows, documents, tokens, and targets (tokens in the loss) that are trained on."""

    name: str
    num_rows: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    num_too_long: int = 0
    num_train_rows: int = 0


@dataclass(frozen=True)
class DataManifest:
    """Manifest of a folder of prepared data. It is written last and marks the folder as complete."""

    fingerprint: str
    sequence_length: int
    num_train_documents: int
    num_train_packs: int
    num_train_tokens: int
    num_train_targets: int
    num_validation_documents: int
    num_too_long: int
    max_seqlen: int
    num_in_both: int = 0  # validation documents, or pairs, that are also trained on
    num_shared_tokens: int = 0
    """Prompt tokens of training pairs that are stored once, not again for the rejected side (`data.share_prompts`)."""
    num_row_tokens: int = 0
    """Tokens of the training documents as padded rows (`data.packing: off`), padding included."""
    num_documents: int = 0  # documents of all splits before any is dropped, truncated, or split
    too_long: dict[str, int] = field(default_factory=dict)
    """Number of documents longer than a pack, by what happened with them (`data.too_long`)."""
    sources: tuple[SourceStats, ...] = ()
    preparation_version: int = 0  # version of the code that prepared the data
    digests: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the packs of each split and of the tokenizer. `documents` is the sum of the digests of all training
    documents, which does not depend on the length of packs."""
    pictures: PictureInputs | None = None
    """How the model takes the pictures of documents; None if `data.pictures` is off."""

    @property
    def identity(self) -> str:
        """Identity of the data in checkpoints.

        If another version of ftkit prepares a plan's data again into different packs, the plan's fingerprint stays the
        same and only the identity changes.
        """
        return f"{self.fingerprint}@{self.preparation_version}"

    @property
    def fill_ratio(self) -> float:
        """Fraction of the training packs that is not padding."""
        return self.num_train_tokens / max(1, self.num_train_packs * self.sequence_length)


_TOKENS, _DOCUMENTS, _SOURCES = "tokens.u32", "documents.i64", "sources.u16"
_PACKS, _TARGETS, _STARTS = "packs.i64", "targets.i64", "starts.i64"
_RECORDS, _PICTURES = "pictures.i64", "pictures.bin"
"""Little-endian arrays without a header: tokens; the end of each document in tokens; the source of each document; the
end of each pack in documents; the targets of each pack; the tokens that each document shares with the preceding one
(no file if none does); begin and end of the record of each document's pictures; and the records, in the order of rows
(no file of these two without pictures)."""
_TYPES = ("<u4", "<i8", "<u2", "<i8", "<i8", "<i8", "<i8")  # of these arrays except the last


class PackWriter:
    """Writes the packs of a split one after another, in constant memory."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.num_documents = self.num_packs = self.num_tokens = self.num_targets = self.num_shared = 0
        self._picture_bytes = 0
        self._stack, self._folder = ExitStack(), folder
        names = (_TOKENS, _DOCUMENTS, _SOURCES, _PACKS, _TARGETS, _STARTS, _RECORDS, _PICTURES)
        self._files = {name: self._stack.enter_context((folder / name).open("wb")) for name in names}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
        unused = [] if self.num_shared else [_STARTS]
        for name in unused if self._picture_bytes else [*unused, _RECORDS, _PICTURES]:
            (self._folder / name).unlink()

    def keep_pictures(self, documents: DocumentBatch) -> DocumentBatch:
        """Write the records of pictures; return the documents with their places in the file."""
        if not documents.pictures:
            return documents
        begin = self._picture_bytes
        self._picture_bytes += self._files[_PICTURES].write(documents.pictures)
        return replace(documents, records=documents.records + begin, pictures=b"")

    def write(self, documents: DocumentBatch, pack_sizes: Sequence[int]) -> None:
        documents = self.keep_pictures(documents)
        ends = self.num_tokens + np.cumsum(documents.lengths, dtype=np.int64)
        last = np.cumsum(pack_sizes, dtype=np.int64) - 1
        starts = np.concatenate([[0], ends[last[:-1]] - self.num_tokens])
        targets = np.add.reduceat(documents.tokens >= TRAINED, starts, dtype=np.int64)
        arrays: list[NDArray[np.generic]] = [documents.tokens, ends, documents.sources, self.num_documents + last + 1]
        arrays += [targets, documents.starts, documents.records]
        for file, array, kind in zip(self._files.values(), arrays, _TYPES, strict=False):
            file.write(array.astype(kind, copy=False).data)
        self.num_documents += len(documents.lengths)
        self.num_packs += len(pack_sizes)
        self.num_tokens += len(documents.tokens)
        self.num_targets += int(targets.sum())
        self.num_shared += int(documents.starts.sum())


class PackStore:
    """The packs of a split, mapped into memory; a pack is read on access."""

    def __init__(self, folder: Path, sequence_length: int) -> None:
        self.sequence_length = sequence_length
        self._tokens = _map(folder / _TOKENS, "<u4")
        self._document_ends = _map(folder / _DOCUMENTS, "<i8")
        self._sources = _map(folder / _SOURCES, "<u2")
        self._pack_ends = _map(folder / _PACKS, "<i8")
        self.num_targets: NDArray[np.int64] = _map(folder / _TARGETS, "<i8")
        """Tokens of each pack that count in the loss."""
        self.shares_prompts = (folder / _STARTS).is_file()
        self._starts = _map(folder / _STARTS, "<i8") if self.shares_prompts else np.zeros(self.num_documents, np.int64)
        self.has_pictures = (folder / _RECORDS).is_file()
        self._pictures = _map(folder / _PICTURES, "u1").data if self.has_pictures else memoryview(b"")
        records = _map(folder / _RECORDS, "<i8") if self.has_pictures else np.zeros(2 * self.num_documents, np.int64)
        num_documents, num_tokens = (int(each[-1:].sum()) for each in (self._pack_ends, self._document_ends))
        expected = (num_documents, num_documents, num_documents, num_tokens, len(self), 2 * num_documents)
        arrays = (self._document_ends, self._sources, self._starts, self._tokens, self.num_targets, records)
        if expected != tuple(map(len, arrays)) or records.max(initial=0) > len(self._pictures):
            raise _damaged(folder, "its files have different numbers of entries")
        self._records = records.reshape(-1, 2)

    def __len__(self) -> int:
        return len(self._pack_ends)

    @property
    def num_documents(self) -> int:
        return len(self._document_ends)

    def documents(self, packs: Sequence[int]) -> NDArray[np.int64]:
        """Return the indices of the documents in packs."""
        numbers = np.asarray(packs, np.int64)  # the list may be empty
        last, first = self._pack_ends[numbers], np.where(numbers > 0, self._pack_ends[numbers - 1], 0)
        counts = last - first
        documents: NDArray[np.int64] = np.arange(counts.sum()) + np.repeat(last - np.cumsum(counts), counts)
        return documents

    def whole_packs(self, num_documents: int) -> tuple[int, int]:
        """Return the number of whole packs among the first documents, and the number of documents in these packs."""
        num_packs = int(np.searchsorted(self._pack_ends, num_documents, side="right"))
        return num_packs, int(self._pack_ends[num_packs - 1]) if num_packs else 0

    def document_lengths(self, packs: Sequence[int]) -> NDArray[np.int64]:
        """Return the number of tokens of each document in packs, without padding."""
        documents = self.documents(packs)
        begins = np.where(documents > 0, self._document_ends[documents - 1], 0)
        lengths: NDArray[np.int64] = self._document_ends[documents] - begins
        return lengths

    def document_starts(self, packs: Sequence[int]) -> NDArray[np.int64]:
        """Return the number of tokens that each document in packs shares with the preceding one."""
        starts: NDArray[np.int64] = self._starts[self.documents(packs)]
        return starts

    def pictures(self, packs: Sequence[int]) -> list[Arrays]:
        """Return the pictures of documents in packs, in order, as read-only views of the mapped file."""
        places = self._records[self.documents(packs)]
        return [from_record(self._pictures[begin:end]) for begin, end in places if begin < end]

    def read(self, packs: Sequence[int]) -> NDArray[np.int32]:
        """Read packs.

        Returns:
            int32 [packs, 4, length]: tokens, labels, positions, and sources, with the bit `REJECTED` where it applies.
            `labels[i]` is the token to predict after `tokens[i]`, or `IGNORED`. Positions restart in each document, at
            0 or after the shared prompt; the model isolates documents by this. The padding at the end is a document
            without labels that repeats the pack's first token: a padding token's embedding may be zero, at which
            Gemma 3n's layers have infinite gradients (square roots).
        """
        read = np.zeros((len(packs), 4, self.sequence_length), dtype=np.int32)
        for into, pack in zip(read, packs, strict=True):
            first = int(self._pack_ends[pack - 1]) if pack else 0
            last = int(self._pack_ends[pack])
            begin = int(self._document_ends[first - 1]) if first else 0
            ends = np.asarray(self._document_ends[first:last]) - begin
            starts = np.concatenate([[0], ends])
            length = int(ends[-1])
            tokens = np.asarray(self._tokens[begin : begin + length])
            into[0, :length] = tokens & ~TRAINED
            into[0, length:] = into[0, 0]
            into[1] = IGNORED
            into[1, : length - 1] = np.where(tokens[1:] >= TRAINED, into[0, 1:length], IGNORED)
            places = np.arange(self.sequence_length, dtype=np.int64)
            origins = starts - np.append(self._starts[first:last], 0)
            into[2] = places - origins[np.searchsorted(starts, places, side="right") - 1]
            into[3, :length] = np.repeat(self._sources[first:last], np.diff(starts))
        return read


def _map(path: Path, dtype: str) -> NDArray[Any]:
    try:
        if path.stat().st_size == 0:  # can't be mapped
            return np.empty(0, dtype)
        return np.memmap(path, dtype=dtype, mode="r")
    except (OSError, ValueError) as error:
        raise _damaged(path.parent, str(error)) from error


def _damaged(folder: Path, reason: str) -> DataError:
    return DataError(
        f"the prepared data can't be read: {folder}: {reason}",
        meaning="a file is missing, truncated or replaced",
        fix=f"delete {folder.parent} and prepare again",
    )


class PreparedData:
    """A folder of prepared data: manifest, tokenizer, packs of both splits, and the validation rows as read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest_path = DataLayout(root).manifest
        self.tokenizer, self.train, self.validation = (root / name for name in ("tokenizer", "train", "validation"))
        self.validation_rows, self.validation_sources = root / "validation.jsonl", root / "validation.sources"

    @property
    def is_complete(self) -> bool:
        return self.manifest_path.is_file()

    def read_train(self) -> PackStore:
        return PackStore(self.train, self.read_manifest().sequence_length)

    def read_validation(self) -> PackStore:
        return PackStore(self.validation, self.read_manifest().sequence_length)

    def read_manifest(self) -> DataManifest:
        try:
            manifest, reason = read_json(self.manifest_path, DataManifest), f"{self.manifest_path.name} is missing"
        except DamagedFileError as error:
            manifest, reason = None, error.what
        if manifest is None:
            raise DataError(
                f"the prepared data in {self.root} can't be read: {reason}",
                meaning="preparation did not run or was interrupted",
                fix=f"delete {self.root} and run again",
            )
        return manifest

    def write_manifest(self, manifest: DataManifest) -> None:
        """Write the manifest, which completes the folder."""
        write_json(self.manifest_path, manifest)

    def compute_digests(self) -> dict[str, str]:
        """Return the SHA-256 of the packs of each split and of the tokenizer, over names and contents of files."""
        digests = {}
        for folder in (self.train, self.validation, self.tokenizer):
            combined = hashlib.sha256()
            for path in files_in(folder):
                combined.update(f"{sha256_of(path)}  {path.relative_to(folder)}\n".encode())
            digests[folder.name] = combined.hexdigest()
        return digests

    def folder_of(
        self, kind: str, weights: str, facts: Sequence[object], needed: Iterable[str], own_root: Path
    ) -> Path:
        """Return the folder for the outputs of a model on this data, named by a hash of data, weights, and `facts`.

        It is inside the data's folder. If that is not writable and lacks a `needed` file, it is below `own_root`.
        """
        files = [(path.name, path.stat()) for path in sorted(Path(weights).glob("*.safetensors")) if is_path(weights)]
        stamps = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
        key = json.dumps([self.read_manifest().identity, weights, stamps, *facts], sort_keys=True)
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        folder = self.root / kind / name
        existing = next(each for each in (folder, folder.parent, self.root) if each.exists())
        is_usable = os.access(existing, os.W_OK) or all((folder / file).is_file() for file in needed)
        return folder if is_usable else own_root / kind / name

    def read_validation_rows(self, names: Sequence[str] = ()) -> list[tuple[str, Row]]:
        """Read the validation rows, each with its source's name in `names`, or an empty one."""
        rows = read_json_lines(self.validation_rows)
        numbers = map(int, self.validation_sources.read_text(encoding="ascii").split())
        return [(names[number] if names else "", row) for number, row in zip(numbers, rows, strict=True)]


@contextmanager
def new_prepared_data(final: Path) -> Iterator[PreparedData]:
    """Yield a folder to write into; rename it to its final name on success.

    If another process has completed the same folder meanwhile, this copy is discarded.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    limit = time.time() - 24 * 3600  # older folders were left by a killed preparation
    for folder in final.parent.glob(".*-*"):  # of any data
        with suppress(OSError):  # belongs to another user, or was removed by another job
            if max(path.stat().st_mtime for path in (folder, *folder.rglob("*"))) < limit:
                shutil.rmtree(folder)
    temporary = final.with_name(f".{final.name}-{secrets.token_hex(4)}")
    temporary.mkdir()  # with the umask's permissions: colleagues may share prepared data
    try:
        yield PreparedData(temporary)
        if not PreparedData(final).is_complete:
            publish(temporary, final)
    finally:
        remove(temporary)
