"""Read a checkpoint's marker and verify its files against it, without torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from ftkit.errors import NotFoundError
from ftkit.files import DamagedFileError, read_json, sha256_of

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout

MARKER = "COMPLETE.json"
FORMAT_VERSION: Final = 1  # of a checkpoint's files; other versions are refused


class DamagedCheckpointError(Exception):
    """A file of a checkpoint is changed or unreadable; the message includes its name."""


@dataclass(frozen=True)
class BestEvaluation:
    """The best evaluation of a run so far: its step, and the metric with its value."""

    step: int
    metric: str
    value: float


@dataclass(frozen=True)
class TrainState:
    """State of a run besides weights and optimizer states.

    The last step of an epoch that was planned as the final one may have had fewer packs than a batch.
    """

    step: int
    fingerprint: str  # `DataManifest.identity` of its data
    best: BestEvaluation | None = None  # None without `evaluation.best` or early stopping
    evaluations_without_improvement: int = 0  # consecutive, up to the newest
    num_packs: int = 0  # counted each time they are trained on
    num_tokens: int = 0  # of the documents in these packs, without padding
    num_targets: int = 0  # tokens of these that count in the loss


@dataclass(frozen=True)
class SavedFile:
    """Size in bytes and SHA-256 of a file of a checkpoint."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> SavedFile:
        return cls(path.stat().st_size, sha256_of(path))

    def is_content_of(self, path: Path) -> bool:
        """Return whether a file has this content; False if it is missing or unreadable."""
        try:
            return path.stat().st_size == self.size and SavedFile.of(path) == self
        except OSError:
            return False


@dataclass(frozen=True)
class Marker:
    """The content of a checkpoint's COMPLETE.json."""

    version: Literal[1]
    progress: TrainState
    world_size: int
    files: dict[str, SavedFile]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


def read_marker(folder: Path, step: int) -> Marker:
    """Read a checkpoint's marker; DamagedCheckpointError if it is missing, damaged, or of another checkpoint."""
    try:
        marker = read_json(folder / MARKER, Marker)
    except DamagedFileError as error:
        raise DamagedCheckpointError(f"{MARKER}: {error.reason}") from error
    if marker is None:
        raise DamagedCheckpointError(f"{MARKER} is missing")
    if any(os.path.basename(name) != name for name in marker.files):  # noqa: PTH119 - Path drops a trailing slash
        raise DamagedCheckpointError(f"{MARKER}: it lists files of other folders")
    if marker.progress.step != step:
        raise DamagedCheckpointError(f"{MARKER}: it belongs to step {marker.progress.step}")
    return marker


def find_damage(folder: Path, marker: Marker, names: Iterable[str]) -> list[str]:
    return [name for name in names if not marker.files[name].is_content_of(folder / name)]


def list_checkpoints(layout: RunLayout) -> list[tuple[int, Path]]:
    """Return the complete checkpoints with their steps, oldest first; empty if they can't be listed."""
    try:
        return layout.list_checkpoints()
    except OSError:
        return []


def read_selection(layout: RunLayout) -> BestEvaluation | None:
    """Return the best evaluation by `evaluation.best`, from the newest checkpoint; None if its checkpoint is gone."""
    found = layout.list_checkpoints()
    for step, folder in reversed(found):
        with suppress(DamagedCheckpointError):
            best = read_marker(folder, step).progress.best
            return best if best is not None and best.step in dict(found) else None
    return None


def find_best(layout: RunLayout) -> BestEvaluation | None:
    """Resolve `RUN@best`: by `evaluation.best`, else by the lowest validation loss; None if nothing was evaluated."""
    if selected := read_selection(layout):
        return selected
    # Imported here because a plan needs at most a marker.
    from ftkit.runs.metrics_file import read_evaluations  # noqa: PLC0415

    steps, records = dict(layout.list_checkpoints()), read_evaluations(layout.metrics)
    losses = {record.step: record.loss for record in records if record.step in steps and math.isfinite(record.loss)}
    step = min(losses, key=losses.__getitem__, default=None)
    return None if step is None else BestEvaluation(step, "loss", losses[step])


def choose_step(layout: RunLayout, typed: str, steps: Iterable[int]) -> int:
    """Resolve a step that a user typed, of the existing `steps`: a number, `last`, `best`, or empty.

    Empty means the best by `evaluation.best`, or the last if the recipe does not set that.
    """
    available = sorted(steps)
    listed = ", ".join(map(str, available))
    run = layout.root.name
    if not available:
        raise NotFoundError(
            f"{run} has no checkpoint and no export yet",
            meaning="it did not train far enough, or its folder was cleaned up",
            fix=f"see its state with 'ftkit status {run}'; '{run}@0' is the model before training",
        )
    best = {"": read_selection, "best": find_best}.get(typed, lambda _: None)(layout)
    if best is not None and best.step in available:
        return best.step
    if typed in ("", "last"):
        return available[-1]
    if typed == "best":
        raise NotFoundError(
            f"best: none of the remaining steps of {run} was evaluated (steps {listed})",
            meaning="validation ran at other steps than checkpoints, or there is no validation split",
            fix="give a step, or 'last'",
        )
    if typed.isdecimal() and int(typed) in available:
        return int(typed)
    raise NotFoundError(
        f"{run} has no checkpoint or export of step {typed}",
        meaning=f"its steps: {listed}; older checkpoints are deleted (training.keep_checkpoints)",
        fix="give one of these, 'last' or 'best'",
    )
