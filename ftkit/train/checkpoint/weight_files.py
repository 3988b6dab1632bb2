"""Write safetensors files while their tensors are computed, so that no whole file is in memory.

The format is a length, a JSON header of that length, and the tensors at the header's offsets, without gaps
(https://huggingface.co/docs/safetensors). The header comes first, so all shapes must be known before any tensor is.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from ftkit.errors import TrainingError
from ftkit.files import sync, write_json
from ftkit.models.weight_files import LENGTH_BYTES, WEIGHTS_FILE, WEIGHTS_INDEX
from ftkit.runs.checkpoints import SavedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

_SHARD_BYTES = 2 * 2**30
_PIECE_BYTES = 2**23
"""Bytes that are hashed and written at a time: they are read from memory once, and then from a CPU's cache."""
_ALIGNMENT = 8
"""Headers are padded with spaces to a multiple of this."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of dtypes."""


def write_weights(
    declared: Mapping[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    folder: Path,
    name: str = WEIGHTS_FILE,
    shard_bytes: int = _SHARD_BYTES,
) -> dict[str, SavedFile]:
    """Write tensors to one file, or to several with an index; return the files' sizes and digests.

    A tensor is hashed while it is written, and a file is synced while the next one is written.

    `declared` has their shapes and dtypes, on the meta device, by their names in the files; `tensors` their values in
    host memory, in the same order. Larger dtypes come first: readers need tensors aligned to their dtype, and the
    format allows no gaps. A file is larger than `shard_bytes` only if it has a single tensor.

    Raises:
        TrainingError: a tensor differs from its declaration.
    """
    shards = _in_shards(declared, shard_bytes)
    files = [name]
    if len(shards) > 1:
        files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    values, saved = iter(tensors), {}
    with ThreadPoolExecutor(1) as hashing, ThreadPoolExecutor(1) as syncing:
        synced = []
        for file, shard in zip(files, shards, strict=True):
            saved[file] = _write_file(folder / file, shard, values, hashing)
            synced.append(syncing.submit(sync, folder / file))
        for each in synced:
            each.result()
    if len(shards) > 1:
        places = {tensor: file for file, shard in zip(files, shards, strict=True) for tensor in shard}
        total = sum(each.nbytes for each in declared.values())
        write_json(folder / WEIGHTS_INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    return saved


def _in_shards(declared: Mapping[str, torch.Tensor], shard_bytes: int) -> list[dict[str, torch.Tensor]]:
    """Divide tensors, in their order, into files of at most `shard_bytes`."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in declared.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _write_file(
    path: Path, declared: Mapping[str, torch.Tensor], tensors: Iterator[tuple[str, torch.Tensor]], hashing: Executor
) -> SavedFile:
    header = _header(declared)
    digest = hashlib.sha256(header)
    with path.open("wb") as file:
        file.write(header)
        for name, expected in declared.items():
            given, tensor = next(tensors)
            if (name, expected.dtype, expected.shape) != (given, tensor.dtype, tensor.shape):
                raise TrainingError(
                    f"'{given}' is {_describe(tensor)}, and '{name}' of the model is {_describe(expected)}",
                    meaning="the weights belong to another model, or their files were changed",
                    fix="check the base model's files against its config.json, or download them again",
                )
            # A tensor with one element counts as contiguous with any stride, but `view` as bytes requires stride 1.
            flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
            data = flat.view(torch.uint8).numpy().data
            for begin in range(0, len(data), _PIECE_BYTES):
                piece = data[begin : begin + _PIECE_BYTES]
                hashed = hashing.submit(digest.update, piece)
                file.write(piece)
                hashed.result()
            # POSIX_FADV_DONTNEED has Linux begin to write dirty pages to disk, which shortens the sync at the end.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return SavedFile(file.tell(), digest.hexdigest())


def _header(declared: Mapping[str, torch.Tensor]) -> bytes:
    """Return the length and the header of a file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in declared.items():
        end = begin + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = text.ljust(math.ceil(len(text) / _ALIGNMENT) * _ALIGNMENT)
    return len(padded).to_bytes(LENGTH_BYTES, "little") + padded


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}"
