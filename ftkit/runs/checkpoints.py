"""What a checkpoint's marker says of its files, read and compared without torch."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftkit.files import DamagedFileError, read_json

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MARKER = "COMPLETE.json"


class DamagedCheckpointError(Exception):
    """A file of a checkpoint is not what it was, or can't be read; the message names it."""


@dataclass(frozen=True)
class TrainState:
    """What a run continues from besides weights and optimizer states: steps done, and the identity of its data."""

    step: int
    fingerprint: str


@dataclass(frozen=True)
class SavedFile:
    """Size in bytes and SHA-256 of a file of a checkpoint."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> SavedFile:
        """Read a file, and return what it is.

        Raises:
            OSError: it can't be read.
        """
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(path.stat().st_size, digest)


@dataclass(frozen=True)
class Marker:
    """What a checkpoint holds: COMPLETE.json."""

    progress: TrainState
    world_size: int
    files: dict[str, SavedFile]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


def read_marker(folder: Path, step: int) -> Marker:
    """Read what the checkpoint of a step should hold.

    Raises:
        DamagedCheckpointError: the marker is missing, can't be read, or is not that of such a checkpoint.
    """
    try:
        marker = read_json(folder / MARKER, Marker)
    except DamagedFileError as error:
        raise DamagedCheckpointError(f"{MARKER}: {error.reason}") from error
    if marker is None:
        raise DamagedCheckpointError(f"{MARKER} is not there")
    if any(os.path.basename(name) != name for name in marker.files):  # noqa: PTH119 - Path drops a trailing slash
        raise DamagedCheckpointError(f"{MARKER}: it lists files of other folders")
    if marker.progress.step != step:
        raise DamagedCheckpointError(f"{MARKER}: it is that of step {marker.progress.step}")
    return marker


def find_damage(folder: Path, marker: Marker, names: Iterable[str]) -> list[str]:
    """Return which of some files of a checkpoint differ from what the marker says."""
    return [name for name in names if not _is_as_written(folder / name, marker.files[name])]


def _is_as_written(path: Path, file: SavedFile) -> bool:
    try:
        return SavedFile.of(path) == file
    except OSError:  # missing or unreadable
        return False
