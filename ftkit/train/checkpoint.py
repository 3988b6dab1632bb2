"""Checkpoints on disk: complete or not there.

Every rank writes its part under a temporary name; a marker with the files, sizes and digests comes last; then
the folder takes its final name. A loader looks at final names alone, and checks files against the marker.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.api import CheckpointException

from ftkit.errors import TrainingError

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.layout import RunLayout
    from ftkit.train.engine import Engine
    from ftkit.train.world import World

log = logging.getLogger(__name__)

MARKER = "COMPLETE.json"


@dataclass(frozen=True)
class Progress:
    """How far a run is: all that goes on from a checkpoint besides weights and optimizer."""

    step: int
    fingerprint: str


@dataclass(frozen=True)
class SavedFile:
    """A file of a checkpoint as it was written."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Marker:
    """What a checkpoint holds."""

    progress: Progress
    world_size: int
    files: dict[str, SavedFile]


def load_newest(engine: Engine, layout: RunLayout, world: World, fingerprint: str) -> Progress | None:
    """Load the newest checkpoint that is whole; None if there is none. Every rank must call it.

    Raises:
        TrainingError: the checkpoint belongs to other data.
    """
    for folder in reversed(list_checkpoints(layout)):
        marker = read_marker(folder)
        damage = sorted(set().union(*world.gather_objects(_find_damage(folder, marker, world))))
        if damage:
            log.warning("checkpoint %s is damaged (%s): trying the one before it", folder.name, ", ".join(damage))
            continue
        if marker.progress.fingerprint != fingerprint:
            raise TrainingError(
                f"{folder} was trained on data {marker.progress.fingerprint}, the plan is for {fingerprint}",
                fix="start a new run for new data",
            )
        _load(engine, folder)
        return marker.progress
    return None


def _load(engine: Engine, folder: Path) -> None:
    try:
        engine.load(folder)
    except CheckpointException as error:  # no Exception: nobody above would notice it
        raise TrainingError(
            f"{folder} can't be loaded: {str(error).strip()}",
            meaning="its files are whole, but are not those of this model, method and engine",
            fix="resume with the ftkit that began the run, or begin a new one",
        ) from error


def list_checkpoints(layout: RunLayout) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted(folder for folder in layout.checkpoints.glob("step-*") if (folder / MARKER).is_file())


def read_marker(folder: Path) -> Marker:
    """Read what a checkpoint should hold."""
    values = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    files = {name: SavedFile(**file) for name, file in values["files"].items()}
    return Marker(Progress(**values["progress"]), values["world_size"], files)


def describe(path: Path) -> SavedFile:
    """Return the size and digest of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return SavedFile(path.stat().st_size, digest)


def _find_damage(folder: Path, marker: Marker, world: World) -> list[str]:
    """Return what differs from the marker among this rank's share of the files."""
    share = sorted(marker.files)[world.rank :: world.size]
    return [name for name in share if not (folder / name).is_file() or describe(folder / name) != marker.files[name]]


def begin(final: Path) -> Path:
    """Return an empty folder under the temporary name of a checkpoint."""
    temporary = temporary_of(final)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def temporary_of(final: Path) -> Path:
    """Return where a checkpoint is while it is being written."""
    return final.with_name(f".{final.name}.partial")


def complete(final: Path, marker: Marker) -> None:
    """Write the marker, and let the checkpoint take its name."""
    temporary = temporary_of(final)
    path = temporary / MARKER
    with path.open("w", encoding="utf-8") as file:
        json.dump(asdict(marker), file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    if final.exists():  # the same step, written again after a resume from an older one
        shutil.rmtree(final)
    temporary.rename(final)


def delete_oldest(layout: RunLayout, keep: int) -> None:
    """Delete all but the newest complete checkpoints."""
    for folder in list_checkpoints(layout)[:-keep]:
        doomed = folder.with_name(f".{folder.name}.{time.time_ns()}.deleted")
        folder.rename(doomed)  # at once out of every loader's sight
        shutil.rmtree(doomed, ignore_errors=True)
