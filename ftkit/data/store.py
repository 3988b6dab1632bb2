"""Prepared data on disk: packs as one array that is mapped, not read; written once, then never changed."""

from __future__ import annotations

import secrets
import shutil
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ftkit.data.encoding import IGNORED
from ftkit.data.rows import read_json_lines
from ftkit.errors import DataError
from ftkit.files import DamagedFileError, publish, read_json, remove, write_json
from ftkit.planning.layout import DataLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


_LEFTOVER_SECONDS = 24 * 3600
"""How long after its last write a folder that was not completed is taken for one of a killed preparation."""


@dataclass(frozen=True)
class DataManifest:
    """What a folder of prepared data holds; its existence says that the folder is complete."""

    fingerprint: str
    sequence_length: int
    num_train_documents: int
    num_train_packs: int
    num_train_tokens: int
    num_train_targets: int
    num_validation_documents: int
    num_validation_packs: int
    num_too_long: int
    longest_document: int

    @property
    def fill_ratio(self) -> float:
        """Part of the training packs that is not padding."""
        return self.num_train_tokens / max(1, self.num_train_packs * self.sequence_length)


class PackStore:
    """The packs of one part, as an int32 array of shape [packs, 3, length]: tokens, labels, positions."""

    def __init__(self, path: Path) -> None:
        self.packs: NDArray[np.int32] = np.load(path, mmap_mode="r")
        self.num_targets: NDArray[np.int64] = np.load(path.with_suffix(".targets.npy"))

    def __len__(self) -> int:
        return len(self.packs)

    @staticmethod
    def write(path: Path, packs: NDArray[np.int32]) -> None:
        """Write packs of shape [packs, 3, length] and the number of targets of each."""
        np.save(path, packs)
        np.save(path.with_suffix(".targets.npy"), (packs[:, 1] != IGNORED).sum(axis=1, dtype=np.int64))


@dataclass(frozen=True)
class PreparedData:
    """A folder of prepared data."""

    root: Path

    @property
    def manifest_path(self) -> Path:
        """Written last."""
        return DataLayout(self.root).manifest

    @property
    def tokenizer(self) -> Path:
        """The tokenizer, in Hugging Face's layout."""
        return self.root / "tokenizer"

    @property
    def train(self) -> Path:
        """Packs to train on."""
        return self.root / "train.npy"

    @property
    def validation(self) -> Path:
        """Packs of the validation split."""
        return self.root / "validation.npy"

    @property
    def validation_rows(self) -> Path:
        """The validation rows as they were read, one JSON object a line."""
        return self.root / "validation.jsonl"

    @property
    def is_complete(self) -> bool:
        """Whether preparation came to its end."""
        return self.manifest_path.is_file()

    def read_manifest(self) -> DataManifest:
        """Read the manifest.

        Raises:
            DataError: the data is not prepared.
        """
        try:
            manifest = read_json(self.manifest_path, DataManifest)
        except DamagedFileError as error:
            raise self._not_prepared(error.what) from error
        if manifest is None:
            raise self._not_prepared(f"{self.manifest_path.name} is not there")
        return manifest

    def _not_prepared(self, reason: str) -> DataError:
        return DataError(
            f"the prepared data in {self.root} can't be read: {reason}",
            meaning="preparation did not run or was interrupted",
            fix=f"delete {self.root} and run again",
        )

    def write_manifest(self, manifest: DataManifest) -> None:
        """Write the manifest."""
        write_json(self.manifest_path, manifest)

    def read_validation_rows(self) -> list[dict[str, Any]]:
        """Read the columns of the validation rows."""
        return [row.columns for row in read_json_lines(self.validation_rows)]


@contextmanager
def new_prepared_data(final: Path) -> Iterator[PreparedData]:
    """Give a folder to write into that takes its final name only when all went well.

    Whoever comes second while another writes the same finds the name taken, and leaves its own copy out.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(final.parent)
    temporary = final.with_name(f".{final.name}-{secrets.token_hex(4)}")
    temporary.mkdir()  # as the umask has it: colleagues may share prepared data
    try:
        yield PreparedData(temporary)
        if not PreparedData(final).is_complete:
            publish(temporary, final)
    finally:
        remove(temporary)


def _remove_leftovers(parent: Path) -> None:
    """Remove what killed preparations left, of any data, apart from young folders that may still be written to."""
    limit = time.time() - _LEFTOVER_SECONDS
    for folder in parent.glob(".*-*"):
        with suppress(OSError):  # somebody else's, or another job removes it too
            if max(path.stat().st_mtime for path in (folder, *folder.rglob("*"))) < limit:
                shutil.rmtree(folder)
