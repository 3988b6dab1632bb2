"""Write safetensors files while their tensors are computed, so that no whole file is in memory.

The format is a length, a JSON header of that length, and the tensors at the header's offsets, without gaps
(https://huggingface.co/docs/safetensors). The header comes first, so all shapes must be known before any tensor is.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import defaultdict
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ftkit.errors import TrainingError
from ftkit.files import sync, write_json
from ftkit.models.weight_files import LENGTH_BYTES, WEIGHTS_FILE, WEIGHTS_INDEX
from ftkit.process import num_usable_cpus
from ftkit.runs.checkpoints import SavedFile
from ftkit.train.components.batches import computed_ahead
from ftkit.train.model.hf_model import find_decoder_layers
from ftkit.train.model.weight_conversion import converts_layout, split_as_stored

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

_MAX_THREADS = 4
"""Threads that compute tensors: more would compute faster than disks write, and hold more tensors."""
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


# --- Models --------------------------------------------------------------------------------------


def write_model(
    model: PreTrainedModel, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, folder: Path
) -> dict[str, SavedFile]:
    """Write a model's weights in the layout of files on the hub, rounded to `dtype`; return sizes and digests.

    `weights` are by the model's names, each computed on access.
    """
    units = _units(model, weights, dtype)
    return write_weights(_declared(model, units, dtype), _as_stored(model, weights, units, dtype), folder)


def _units(model: PreTrainedModel, names: Iterable[str], dtype: torch.dtype) -> list[list[str]]:
    """Group tensors that are converted together to the layout of files: each alone, or those of a decoder layer.

    Larger dtypes come first, as in the files.
    """
    tensors = dict((*model.named_buffers(), *model.named_parameters()))
    layers = find_decoder_layers(model)
    prefixes = [name for name, module in model.named_modules() if any(module is layer for layer in layers)]
    if not converts_layout(model):
        prefixes = []
    units = defaultdict(list)
    for name in names:
        prefix = next((prefix for prefix in prefixes if name.startswith(f"{prefix}.")), name)
        units[rounded(tensors[name].to("meta"), dtype).element_size(), prefix].append(name)
    return [units[key] for key in sorted(units, key=lambda key: -key[0])]


def _declared(model: PreTrainedModel, units: Iterable[Sequence[str]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of the files, on the meta device."""
    tensors = dict((*model.named_buffers(), *model.named_parameters()))
    stored: dict[str, torch.Tensor] = {}
    for unit in units:
        stored |= split_as_stored(model, {name: rounded(tensors[name].to("meta"), dtype) for name in unit})
    return stored


def _as_stored(
    model: PreTrainedModel, weights: Mapping[str, torch.Tensor], units: Iterable[Sequence[str]], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors in the layout of files on the hub.

    The next units are computed in parallel, each by one thread, while one is written. The operations are short: on a
    loaded machine, several threads per operation spend most of their time waiting for each other.
    """

    def compute(unit: Sequence[str]) -> Mapping[str, torch.Tensor]:
        return split_as_stored(model, {name: rounded(weights[name], dtype) for name in unit})

    size = min(_MAX_THREADS, num_usable_cpus())
    with one_thread_per_operation(), ThreadPoolExecutor(size) as threads:
        for tensors in computed_ahead(threads, compute, units, size):
            yield from tensors.items()


@contextmanager
def one_thread_per_operation() -> Iterator[None]:
    """Have torch compute each CPU operation in the calling thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in `dtype` if it is floating-point, else as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
