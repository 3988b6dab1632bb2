"""Load checkpoints after comparing them with their marker, and without unpickling arbitrary objects.

torch's reader unpickles the index of a checkpoint (`.metadata`), and every entry that is not a tensor. A pickle can
call any function, so anyone who can write to a run's folder could run code as the user who resumes it. Here, the index
may contain only torch's dataclasses, and a checkpoint only tensors (docs/adr/0020).
"""

from __future__ import annotations

import logging
import pathlib
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint import metadata, state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from ftkit.errors import TrainingError, one_line
from ftkit.runs.checkpoints import MARKER, DamagedCheckpointError, Marker, TrainState, find_damage, read_marker
from ftkit.train.model.weight_conversion import LazyTensors
from ftkit.train.private_apis.torch import checkpoint_index_names

if TYPE_CHECKING:
    import io

    from torch import nn
    from torch.distributed.checkpoint.planner import ReadItem

    from ftkit.planning.layout import RunLayout
    from ftkit.train.engine import Engine, State
    from ftkit.train.world import World

log = logging.getLogger(__name__)

INDEX = ".metadata"  # torch's name of the index, which maps tensors to files
_MODEL = "model."  # prefix of the trained weights in a checkpoint: the key of `Engine.state`


class ForeignCheckpointError(Exception):
    """An undamaged checkpoint belongs to another model."""


def reason_of(error: OSError | CheckpointException | ForeignCheckpointError) -> str:
    """Return in one line why a checkpoint can't be written or loaded, for the first rank that failed."""
    if isinstance(error, CheckpointException):
        return next(iter(one_line(cause) for cause, _ in error.failures.values()), one_line(error))
    return str(error)


def load_newest(
    engine: Engine, layout: RunLayout, world: World, data: str
) -> tuple[TrainState | None, tuple[int, ...]]:
    """Load the newest undamaged checkpoint; return its state, if any, and the steps of damaged ones. Collective."""
    found: list[tuple[int, Path]] = []
    if world.is_first:
        try:
            found = layout.list_checkpoints()
        except OSError as error:
            raise TrainingError(
                f"the checkpoints of this run can't be listed: {error}",
                meaning="you lack permission to read them, or the file system is unreachable",
                fix=f"make {layout.checkpoints} readable, then: ftkit resume {layout.root.name}",
            ) from error
    # Use rank 0's list, because a shared file system may show other ranks an older state.
    listed, damaged = world.gather_objects(found)[0], dict[int, str]()
    for step, folder in reversed(listed):
        marker, damage = _check(step, folder, world)
        if marker is None:
            log.warning("checkpoint %s is damaged (%s): trying the one before it", folder.name, damage)
            damaged[step] = f"{folder.name} ({damage})"
            continue
        if marker.progress.fingerprint != data:
            raise TrainingError(
                f"{folder} was trained on data {marker.progress.fingerprint}, but the prepared data is {data}",
                meaning="another version of ftkit prepared the data again, and packs it differently",
                fix="resume with the version of ftkit that started the run, or start a new run",
            )
        _load(engine, folder)
        return marker.progress, tuple(sorted(damaged))
    if damaged:
        raise TrainingError(
            f"every checkpoint in {layout.checkpoints} is damaged: {', '.join(damaged.values())}",
            meaning="the file system lost data, files were changed or moved, or this user may not read them",
            fix=f"restore one of them, then: ftkit resume {layout.root.name}; or start a new run. Nothing was deleted",
        )
    return None, ()


def load_best(engine: Engine, layout: RunLayout, world: World, step: int) -> bool:
    """Load the checkpoint of the best evaluation; return False if it is damaged. Collective."""
    folder = layout.checkpoint(step)
    marker, damage = _check(step, folder, world)
    if marker is None:
        log.warning("the best checkpoint, %s, is damaged (%s): exporting the last one", folder.name, damage)
        return False
    _load(engine, folder)
    return True


def _check(step: int, folder: Path, world: World) -> tuple[Marker | None, str]:
    """Return the marker of an undamaged checkpoint, or a description of the damage; the same on all ranks."""
    marker, own = _compare(folder, step, world.rank, world.size)
    damage = sorted(set().union(*world.gather_objects(own)))
    return (None, ", ".join(damage)) if damage else (marker, "")


def _load(engine: Engine, folder: Path) -> None:
    try:
        engine.load(folder)
    except (CheckpointException, ForeignCheckpointError) as error:  # CheckpointException derives from BaseException
        raise TrainingError(
            f"{folder} can't be loaded: {reason_of(error)}",
            meaning="its files are undamaged, but belong to another model, method or engine",
            fix="resume with the ftkit that started the run, or start a new run",
        ) from error


def describe_damage(folder: Path, step: int) -> str:
    """Compare a whole checkpoint with its marker and check its index; return the damage, or an empty text."""
    return ", ".join(_compare(folder, step)[1])


def _compare(folder: Path, step: int, rank: int = 0, size: int = 1) -> tuple[Marker | None, list[str]]:
    """Compare a rank's share of the files with the marker, and on rank 0 the marker with the index."""
    marker, damage = None, []
    try:
        marker = read_marker(folder, step)
        changed = find_damage(folder, marker, sorted(marker.files)[rank::size])
        damage = [f"{name}: changed, truncated, or missing" for name in changed]
        if not damage and rank == 0:
            needed = {place.relative_path for place in read_index(folder).storage_data.values()}
            if unlisted := needed - marker.files.keys():
                damage = [f"{INDEX}: {MARKER} does not list its '{min(unlisted)}'"]
    except DamagedCheckpointError as error:
        damage = [str(error)]
    except AttributeError as error:
        damage = [f"{INDEX}: {error}"]
    return marker, damage


def read_state(state: State, folder: Path, reader: FileSystemReader | None = None) -> None:
    """Fill the tensors of nested dictionaries in place from a checkpoint of any world size. Collective."""
    with warnings.catch_warnings():
        # `ftkit generate` and `ftkit export` read a checkpoint in a single process without a process group.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        state_dict_loader.load(state, storage_reader=reader or _Reader(folder), planner=_TensorsOnlyPlanner())


def saved_sizes(folder: Path, prefix: str) -> dict[str, torch.Size]:
    """Return the unsharded shapes of a checkpoint's tensors under a prefix, by their names without it."""
    return {name: each.size for name, each in _tensors_of(read_index(folder), prefix).items()}


def check_model(model: nn.Module, folder: Path) -> None:
    """Raise ForeignCheckpointError if a checkpoint has weights that the model lacks, which torch silently ignores."""
    known = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    if unknown := sorted(saved_sizes(folder, _MODEL).keys() - known):
        raise ForeignCheckpointError(f"the model has no '{unknown[0]}'")


def open_trained(folder: Path, shapes: Mapping[str, torch.Size]) -> LazyTensors:
    """Return the trained weights of a checkpoint by their names in the model; each is read on access, from any thread.

    Any engine may have written the checkpoint, at any world size; ZeRO-3's flat tensors are reshaped. Raises
    DamagedCheckpointError if the index is damaged, or does not match `shapes`.
    """
    reader, lock = _Reader(folder), Lock()
    stored = _tensors_of(reader.read_metadata(), _MODEL)
    for name, each in stored.items():
        if name not in shapes or each.size.numel() != shapes[name].numel():
            raise DamagedCheckpointError(f"{INDEX}: the model has no '{name}'")
    if not stored:
        raise DamagedCheckpointError(f"{INDEX}: no weights")

    def read(name: str) -> torch.Tensor:
        tensor = torch.empty(stored[name].size, dtype=stored[name].properties.dtype)
        with lock:
            read_state({_MODEL + name: tensor}, folder, reader)
        return tensor.view(shapes[name])

    return LazyTensors(stored, read)


def read_index(folder: Path) -> Metadata:
    """Return a checkpoint's index: shapes, dtypes and places of its tensors. DamagedCheckpointError if damaged."""
    try:
        with (folder / INDEX).open("rb") as file:
            index = _IndexUnpickler(file).load()
    except Exception as error:  # damaged pickles raise anything
        raise DamagedCheckpointError(f"{INDEX}: {error}") from error
    if not isinstance(index, Metadata):
        raise DamagedCheckpointError(f"{INDEX}: it is a {type(index).__name__}")
    return index


def _tensors_of(index: Metadata, prefix: str) -> dict[str, metadata.TensorStorageMetadata]:
    return {
        name.removeprefix(prefix): each
        for name, each in index.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(each, metadata.TensorStorageMetadata)
    }


class _Reader(FileSystemReader):
    """torch's reader with a safe unpickler. `read_metadata` takes no `kwargs`, so torch expects no index per rank."""

    @cached_property
    def _index(self) -> Metadata:
        return read_index(pathlib.Path(self.path))

    def read_metadata(self) -> Metadata:
        return replace(self._index, storage_meta=metadata.StorageMeta(load_id=self.load_id))


class _TensorsOnlyPlanner(DefaultLoadPlanner):
    """torch's planner, which would unpickle every entry that the index does not declare as a tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        del value
        raise DamagedCheckpointError(f"{INDEX}: '{read_item.storage_index.fqn}' is not a tensor in it")


class _IndexUnpickler(pickle.Unpickler):
    """Unpickle only the dataclasses of an index."""

    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        # Python 3.13 has pathlib's classes in a module below it.
        if (allowed := _ALLOWED.get((module.removesuffix("._local"), name))) is None:
            raise pickle.UnpicklingError(f"it contains '{module}.{name}', which no index of torch has")
        return allowed


_ALLOWED: dict[tuple[str, str], type] = {
    (each.__module__.removesuffix("._local"), each.__qualname__): each
    for each in (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        *checkpoint_index_names(),
        pathlib.PurePosixPath,
        pathlib.PosixPath,
    )
} | {("torch", "Size"): torch.Size}
