"""Checkpoints: the marker, the index, which is a pickle, and the tensors."""

from __future__ import annotations

import json
import pickle
import tempfile
import warnings
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from ftkit.errors import TrainingError
from ftkit.planning.layout import RunLayout
from ftkit.runs.checkpoints import FORMAT_VERSION, MARKER, Marker, SavedFile, TrainState
from ftkit.train.checkpoint.loading import INDEX, load_newest, read_state
from fuzzing.area import Area, Case, read_case, write_case
from fuzzing.mutate import damaged_bytes, damaged_json

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from ftkit.train.world import World

_STEP = 10
_DATA = "the data"
_PIECES = (
    b"cos\nsystem\n",
    b"(S'touch ran'\ntR",
    b"\x93",
    b"\x8c\x05posix\x8c\x06system\x93\x8c\ttouch ran\x85R",
    b".",
    b"\x80\x05",
)


class _Ran:
    """Creates a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


class _Weight:
    """An engine of one weight."""

    def __init__(self) -> None:
        self.weight = torch.ones(3)

    def load(self, folder: Path) -> None:
        read_state({"weight": self.weight}, folder)


class _Alone:
    """A world of size 1."""

    rank, size, is_first = 0, 1, True

    def gather_objects(self, own: Any) -> list[Any]:
        return [own]


@contextmanager
def _without_advice() -> Iterator[None]:
    """Suppress torch's warning about a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


@cache
def _whole() -> Case:
    """Return the files of a checkpoint whose weight is its step."""
    folder = Path(tempfile.mkdtemp())
    with _without_advice():
        torch.distributed.checkpoint.save({"weight": torch.full((3,), float(_STEP))}, checkpoint_id=folder)
    return read_case(folder)


def _seal(folder: Path) -> bytes:
    """Return a completion marker for the files in their current state."""
    files = {path.name: SavedFile.of(path) for path in sorted(folder.iterdir())}
    return json.dumps(asdict(Marker(FORMAT_VERSION, TrainState(_STEP, _DATA), 1, files))).encode()


def _make(rng: random.Random) -> Case:
    whole = _whole()
    kind = rng.randrange(4)
    if kind == 0:  # a forged index
        index = pickle.loads(whole[INDEX])  # noqa: S301 - written by this module
        index.state_dict_metadata[rng.choice(("weight", "more"))] = rng.choice((_Ran(), BytesStorageMetadata(), None))
        return {INDEX: pickle.dumps(index, protocol=rng.choice((2, 4, 5)))}
    if kind == 1:
        return {MARKER: damaged_json(rng, _marker())}
    name = rng.choice((INDEX, *whole))
    return {name: damaged_bytes(rng, whole[name], _PIECES)}


@cache
def _marker() -> bytes:
    folder = Path(tempfile.mkdtemp())
    write_case(folder, _whole())
    return _seal(folder)


def _run(case: Case, folder: Path) -> bool:
    layout = RunLayout(folder)
    checkpoint = layout.checkpoint(_STEP)
    write_case(checkpoint, _whole() | case)
    if MARKER not in case:  # an attacker who can write a file can write its digest as well
        (checkpoint / MARKER).write_bytes(_seal(checkpoint))
    engine: Any = _Weight()
    world: World | Any = _Alone()
    with _without_advice():
        try:
            progress, _ = load_newest(engine, layout, world, _DATA)
        except TrainingError:
            progress = None
    assert not Path("ran").exists(), "a checkpoint ran code"
    assert progress is None or progress.step == _STEP
    return progress is not None


CHECKPOINTS = Area("checkpoints", _make, _run)
