"""Read a checkpoint without running anything that is in it.

torch's reader unpickles the index of a checkpoint (`.metadata`), and everything in it that is no tensor. A pickle can
call any function: whoever can write to a run's folder could run code as the user who resumes it. Here the index may
hold torch's own dataclasses alone, and a checkpoint tensors alone.
"""

from __future__ import annotations

import pathlib
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

if TYPE_CHECKING:
    import io
    from pathlib import Path

    from torch.distributed.checkpoint.planner import ReadItem

INDEX = ".metadata"
"""torch's name for the file that says which tensor is in which file."""


class DamagedCheckpointError(Exception):
    """A file of a checkpoint is not what it was, or can't be read; the message names it."""


def read_state(state: dict[str, Any], folder: Path) -> None:
    """Fill the tensors of nested dictionaries in place, from a checkpoint of any world size.

    Every rank must call it.

    Args:
        state: holds nothing but tensors.
        folder: the checkpoint.
    """
    state_dict_loader.load(state, storage_reader=_Reader(folder), planner=_TensorsAlone())


def read_index(folder: Path) -> Metadata:
    """Return what a checkpoint says of its tensors: shapes, types and places.

    Raises:
        DamagedCheckpointError: it is no such index, or holds anything else.
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
    """Return the sizes of a checkpoint's whole tensors, of those under a prefix, without it."""
    stored = read_index(folder).state_dict_metadata
    return {
        name.removeprefix(prefix): each.size
        for name, each in stored.items()
        if name.startswith(prefix) and isinstance(each, metadata.TensorStorageMetadata)
    }


def named_files(index: Metadata) -> set[str]:
    """Return the files that a checkpoint's tensors are in.

    Raises:
        DamagedCheckpointError: it does not say so.
    """
    try:
        return {place.relative_path for place in index.storage_data.values()}
    except AttributeError as error:
        raise DamagedCheckpointError(f"{INDEX}: {error}") from error


class _Reader(FileSystemReader):
    """torch's reader with our reading of the index. It takes no `kwargs`: torch then tries no other index."""

    def read_metadata(self) -> Metadata:
        index = read_index(pathlib.Path(self.path))
        index.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return index


class _TensorsAlone(DefaultLoadPlanner):
    """torch's planner, which would unpickle whatever the index calls no tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        del value
        raise DamagedCheckpointError(f"{INDEX}: '{read_item.storage_index.fqn}' is not a tensor in it")


class _IndexUnpickler(pickle.Unpickler):
    """Makes the dataclasses of an index, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        # Python 3.13 has pathlib's classes in a module below it.
        if (found := _ALLOWED.get((module.removesuffix("._local"), name))) is None:
            raise pickle.UnpicklingError(f"it holds a '{module}.{name}', which no checkpoint does")
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
        metadata._MEM_FORMAT_ENCODING,  # noqa: SLF001
        filesystem._StorageInfo,  # noqa: SLF001
        torch.serialization._get_layout,  # noqa: SLF001 - looks a layout up by its name
        pathlib.PurePosixPath,
        pathlib.PosixPath,
    )
} | {("torch", "Size"): torch.Size}
