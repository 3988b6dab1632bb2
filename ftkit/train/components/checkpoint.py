"""The checkpoint format: files of one folder, complete once the folder has its final name, read without unpickling.

Every rank writes its shards under a temporary name. Rank 0 adds a marker with the size and digest of each file, and
renames the folder to its final name, which makes it a complete checkpoint (`RunLayout.list_checkpoints`). A reader
compares the files with the marker.

torch's reader unpickles the index of a checkpoint (`.metadata`), and every entry that is not a tensor. A pickle can
call any function: whoever can write to a run's folder could run code as the user who resumes it. Here the index may
contain only torch's dataclasses, and a checkpoint only tensors (docs/adr/0025).
"""

from __future__ import annotations

import pathlib
import pickle
import time
import warnings
from dataclasses import replace
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import metadata, state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from ftkit.files import publish, remove, write_json
from ftkit.runs.checkpoints import MARKER, DamagedCheckpointError, Marker, find_damage, read_marker
from ftkit.train.model.weight_conversion import LazyTensors
from ftkit.train.private_apis.torch import checkpoint_index_names

if TYPE_CHECKING:
    import io
    from collections.abc import Mapping
    from pathlib import Path

    from torch import nn
    from torch.distributed.checkpoint.planner import ReadItem

    from ftkit.planning.layout import RunLayout

INDEX = ".metadata"
"""torch's name of the index, which maps tensors to files."""


# --- Writing -------------------------------------------------------------------------------------


def temporary_of(final: Path) -> Path:
    """Return the temporary folder of a checkpoint, the same for all ranks."""
    return final.with_name(f".{final.name}.partial")


def begin(final: Path) -> Path:
    """Make an empty folder under the temporary name of a checkpoint, and return it."""
    temporary = temporary_of(final)
    remove(temporary)
    temporary.mkdir(parents=True)
    return temporary


def complete(final: Path, marker: Marker) -> None:
    """Write the marker, and rename the checkpoint to its final name; a damaged one of the same step is replaced."""
    temporary = temporary_of(final)
    write_json(temporary / MARKER, marker)
    publish(temporary, final)


def delete_oldest(
    layout: RunLayout, step: int, keep: int, *, keep_every: int | None = None, best: int | None = None
) -> None:
    """Delete all checkpoints up to a step except the newest, the best, and those of multiples of `keep_every_steps`.

    Later checkpoints don't count: they are damaged, or training would have resumed from them.

    Raises:
        OSError: one can't be deleted.
    """
    for old, folder in [found for found in layout.list_checkpoints() if found[0] <= step][:-keep]:
        if old == best or (keep_every is not None and old % keep_every == 0):
            continue
        doomed = folder.with_name(f".{folder.name}.{time.time_ns()}.deleted")
        folder.rename(doomed)  # readers don't see it from now on
        remove(doomed)


def remove_leftovers(layout: RunLayout) -> None:
    """Remove partial checkpoints of a job that was killed while it wrote or deleted them."""
    for folder in layout.checkpoints.glob(".step-*"):
        remove(folder)


# --- Reading -------------------------------------------------------------------------------------


def check_index(folder: Path, marker: Marker) -> None:
    """Check that the marker lists all files that the index needs.

    Raises:
        DamagedCheckpointError: it does not, or the index is damaged.
    """
    try:
        needed = {place.relative_path for place in read_index(folder).storage_data.values()}
    except AttributeError as error:
        raise DamagedCheckpointError(f"{INDEX}: {error}") from error
    if unlisted := needed - marker.files.keys():
        raise DamagedCheckpointError(f"{INDEX}: {MARKER} does not list its '{min(unlisted)}'")


def describe_damage(folder: Path, step: int) -> str:
    """Compare a whole checkpoint with its marker and check its index; return the damage, or an empty text."""
    try:
        marker = read_marker(folder, step)
        if damaged := find_damage(folder, marker, sorted(marker.files)):
            return f"{', '.join(damaged)}: changed, truncated, or missing"
        check_index(folder, marker)
    except DamagedCheckpointError as error:
        return str(error)
    return ""


def read_state(state: dict[str, Any], folder: Path) -> None:
    """Fill the tensors of nested dictionaries in place, from a checkpoint of any world size.

    Collective if there is a process group: every rank must call it.

    Args:
        state: contains only tensors.
        folder: the checkpoint.
    """
    _read(state, _Reader(folder))


def _read(state: dict[str, Any], reader: _Reader) -> None:
    with warnings.catch_warnings():
        # `ftkit generate` and `ftkit export` read a checkpoint in a single process without a process group.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        state_dict_loader.load(state, storage_reader=reader, planner=_TensorsOnlyPlanner())


def read_index(folder: Path) -> Metadata:
    """Return a checkpoint's index: shapes, types and places of its tensors.

    Raises:
        DamagedCheckpointError: it is not such an index, or contains anything else.
    """
    try:
        with (folder / INDEX).open("rb") as file:
            index = _IndexUnpickler(file).load()
    except Exception as error:  # damaged pickles raise anything
        raise DamagedCheckpointError(f"{INDEX}: {error}") from error
    if not isinstance(index, Metadata):
        raise DamagedCheckpointError(f"{INDEX}: it is a {type(index).__name__}")
    return index


def saved_sizes(folder: Path, prefix: str) -> dict[str, torch.Size]:
    """Return the shapes of a checkpoint's unsharded tensors under a prefix, by names without it."""
    stored = read_index(folder).state_dict_metadata
    return {
        name.removeprefix(prefix): each.size
        for name, each in stored.items()
        if name.startswith(prefix) and isinstance(each, metadata.TensorStorageMetadata)
    }


class ForeignCheckpointError(Exception):
    """An undamaged checkpoint belongs to another model."""


def absent_frozen(model: nn.Module, folder: Path) -> set[str]:
    """Return the frozen parameters that a checkpoint lacks: earlier versions of ftkit did not write them.

    Raises:
        ForeignCheckpointError: it has weights that the model lacks, and that torch would leave out without a word.
    """
    saved = saved_sizes(folder, _MODEL)
    known = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    if unknown := sorted(saved.keys() - known):
        raise ForeignCheckpointError(f"the model has no '{unknown[0]}'")
    return {name for name, each in model.named_parameters() if not each.requires_grad and name not in saved}


class CheckpointTensors(LazyTensors):
    """The trained weights of a checkpoint, by their names in the model; each is read on access.

    It reads, in one process, what any engine wrote at any world size; ZeRO-3's flat tensors get their shapes back.
    Threads may share it.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, torch.Size]) -> None:
        """Read the index.

        Args:
            folder: the checkpoint.
            shapes: of all of the model's parameters, by name; the checkpoint has the trained ones.

        Raises:
            DamagedCheckpointError: the index is damaged, or belongs to another model.
        """
        self._reader, self._lock = _Reader(folder), Lock()
        stored = self._reader.read_metadata().state_dict_metadata
        self._stored = {
            name.removeprefix(_MODEL): each
            for name, each in stored.items()
            if name.startswith(_MODEL) and isinstance(each, metadata.TensorStorageMetadata)
        }
        self._shapes = shapes
        super().__init__(self._stored)
        wrong = [
            name
            for name, each in self._stored.items()
            if name not in shapes or each.size.numel() != shapes[name].numel()
        ]
        if wrong or not self._stored:
            raise DamagedCheckpointError(
                f"{INDEX}: the model has no '{min(wrong)}'" if wrong else f"{INDEX}: no weights"
            )

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self._stored[name]
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        with self._lock:
            _read({_MODEL + name: tensor}, self._reader)
        return tensor.view(self._shapes[name])


_MODEL = "model."
"""Prefix of the trained weights in a checkpoint: the key of `Engine.state`."""


class _Reader(FileSystemReader):
    """torch's reader with a safe unpickler. As `read_metadata` takes no `kwargs`, torch looks for no index per rank."""

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
    """Creates the dataclasses of an index, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        # Python 3.13 has pathlib's classes in a module below it.
        if (found := _ALLOWED.get((module.removesuffix("._local"), name))) is None:
            raise pickle.UnpicklingError(f"it contains '{module}.{name}', which no index of torch has")
        return found


_ALLOWED: dict[tuple[str, str], Any] = {
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
