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

from pydantic import TypeAdapter, ValidationError
from torch.distributed.checkpoint.api import CheckpointException

from ftkit.errors import TrainingError
from ftkit.train.components.checkpoint_reader import INDEX, DamagedCheckpointError, named_files, read_index

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.planning.layout import RunLayout
    from ftkit.train.engine import Engine
    from ftkit.train.world import World

log = logging.getLogger(__name__)

MARKER = "COMPLETE.json"


@dataclass(frozen=True)
class TrainState:
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

    progress: TrainState
    world_size: int
    files: dict[str, SavedFile]


_MARKER = TypeAdapter(Marker)


def load_newest(engine: Engine, layout: RunLayout, world: World, fingerprint: str) -> TrainState | None:
    """Load the newest checkpoint that is whole; None if none was ever written. Every rank must call it.

    Raises:
        TrainingError: all checkpoints are damaged, or the newest whole one belongs to other data.
    """
    damaged = []
    for step, folder in reversed(_list_on_first_rank(layout, world)):
        marker, damage = _check(step, folder, world)
        if marker is None:
            log.warning("checkpoint %s is damaged (%s): trying the one before it", folder.name, damage)
            damaged.append(f"{folder.name} ({damage})")
            continue
        if marker.progress.fingerprint != fingerprint:
            raise TrainingError(
                f"{folder} was trained on data {marker.progress.fingerprint}, the plan is for {fingerprint}",
                fix="start a new run for new data",
            )
        _load(engine, folder)
        return marker.progress
    if damaged:
        raise TrainingError(
            f"every checkpoint in {layout.checkpoints} is damaged: {', '.join(damaged)}",
            meaning="the file system lost data, files were changed or moved, or this user may not read them",
            fix=f"restore one of them, then: ftkit resume {layout.root.name}; or start a new run. Nothing was deleted",
        )
    return None


def _list_on_first_rank(layout: RunLayout, world: World) -> list[tuple[int, Path]]:
    """Return the checkpoints as rank 0 sees them: a shared file system may show other ranks an older state."""
    found: list[tuple[int, Path]] = []
    if world.is_first:
        try:
            found = layout.list_checkpoints()
        except OSError as error:
            raise TrainingError(
                f"the checkpoints of this run can't be listed: {error}",
                meaning="this user may not read them, or the file system is out of reach",
                fix=f"make {layout.checkpoints} readable, then: ftkit resume {layout.root.name}",
            ) from error
    listed: list[tuple[int, Path]] = world.gather_objects(found)[0]
    return listed


def _check(step: int, folder: Path, world: World) -> tuple[Marker | None, str]:
    """Return what a checkpoint holds, and what is damaged of it; only one of the two. Same on all ranks."""
    try:
        marker = read_marker(folder, step)
        own = _find_damage(folder, marker, world)
    except DamagedCheckpointError as error:
        own = [str(error)]
    damage = sorted(set().union(*world.gather_objects(own)))
    return (None, ", ".join(damage)) if damage else (marker, "")


def _load(engine: Engine, folder: Path) -> None:
    try:
        engine.load(folder)
    except CheckpointException as error:  # no Exception: nobody above would notice it
        raise TrainingError(
            f"{folder} can't be loaded: {str(error).strip()}",
            meaning="its files are whole, but are not those of this model, method and engine",
            fix="resume with the ftkit that began the run, or begin a new one",
        ) from error


def read_marker(folder: Path, step: int) -> Marker:
    """Read what the checkpoint of a step should hold.

    Raises:
        DamagedCheckpointError: the marker is missing, can't be read, or is not that of such a checkpoint.
    """
    try:
        marker = _MARKER.validate_json((folder / MARKER).read_bytes())
    except OSError as error:
        raise DamagedCheckpointError(f"{MARKER}: {error.strerror}") from error
    except ValidationError as error:
        raise DamagedCheckpointError(f"{MARKER}: {error.errors()[0]['msg']}") from error
    if any(os.path.basename(name) != name for name in marker.files):  # noqa: PTH119 - Path drops a trailing slash
        raise DamagedCheckpointError(f"{MARKER}: it lists files of other folders")
    if marker.progress.step != step:
        raise DamagedCheckpointError(f"{MARKER}: it is that of step {marker.progress.step}")
    return marker


def describe(path: Path) -> SavedFile:
    """Return the size and digest of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return SavedFile(path.stat().st_size, digest)


def _find_damage(folder: Path, marker: Marker, world: World) -> list[str]:
    """Return what differs from the marker among this rank's share of the files.

    Raises:
        DamagedCheckpointError: on rank 0, the index is not one, or needs a file that the marker does not list.
    """
    share = sorted(marker.files)[world.rank :: world.size]
    differing = [name for name in share if not _is_as_written(folder / name, marker.files[name])]
    if not differing and world.is_first and (unlisted := named_files(read_index(folder)) - marker.files.keys()):
        raise DamagedCheckpointError(f"{INDEX}: {MARKER} does not list its '{min(unlisted)}'")
    return differing


def _is_as_written(path: Path, file: SavedFile) -> bool:
    try:
        return describe(path) == file
    except OSError:  # missing or unreadable
        return False


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


def delete_oldest(layout: RunLayout, step: int, keep: int) -> None:
    """Delete all but the newest checkpoints up to a step.

    Later ones are there if they were found damaged: they must not push whole ones out, and are written again.
    """
    for _, folder in [found for found in layout.list_checkpoints() if found[0] <= step][:-keep]:
        doomed = folder.with_name(f".{folder.name}.{time.time_ns()}.deleted")
        folder.rename(doomed)  # at once out of every loader's sight
        shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(layout: RunLayout) -> None:
    """Remove what a killed job left of checkpoints that it was writing or deleting."""
    for folder in layout.checkpoints.glob(".step-*"):
        shutil.rmtree(folder, ignore_errors=True)
