"""A folder with a model in Hugging Face's layout: check that it is complete, and read its configurations."""

from __future__ import annotations

import logging
import math
import socket
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftkit.errors import NotFoundError
from ftkit.files import MAX_JSON_BYTES, load_json, open_regular, read_small
from ftkit.models.layouts import adapters_in_bin, incomplete, model_and_adapters, not_a_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHTS_INDEX = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
"""Patterns of a model's other files: configurations, chat templates, and vocabularies in all forms."""
ADAPTER_CONFIG = "adapter_config.json"
"""File of peft in a folder of adapters."""
ADAPTER_FILE = "adapter_model.safetensors"
"""File of peft's weights in it."""
SENTENCEPIECE_FILE = "tokenizer.model"
"""A SentencePiece model, from which `tokenizer.json` was made."""
ADDED_TOKENS_FILE = "added_tokens.json"
"""Tokens with their ids that are not in a SentencePiece model."""
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`, which reserves memory for adapters of that rank."""
EXPORT_RECORD = "ftkit-export.json"
"""File of ftkit in an export, with the digests of its weights."""
LENGTH_BYTES = 8
"""Bytes of the little-endian length before the header of a safetensors file."""
_MAX_HEADER_BYTES = 100_000_000
"""Limit of the format."""
_MAX_NAME = 255
"""Longest name of a file, in bytes."""
_TIED = "tie_word_embeddings"
_EMBEDDING, _PROJECTION = "embed_tokens.weight", "lm_head.weight"
"""Suffixes of the names of the two tables that may be tied."""
_COMPARE_CHUNK_BYTES = 2**24
"""Number of bytes that are compared at a time."""


def check_folder(folder: Path) -> None:
    """Check that a folder of weights exists, with a configuration and safetensors that are not truncated.

    Raises:
        NotFoundError: it is missing, incomplete, or in another format.
    """
    if folder.is_file():
        raise not_a_folder(folder)
    if not folder.is_dir():
        raise NotFoundError(
            f"model.weights: there is no folder {folder} on {socket.gethostname()}",
            meaning="the path is wrong, or its file system is not mounted there",
            fix="give the right path: model.weights=PATH",
        )
    if missing := missing_files(folder):
        raise incomplete(folder, missing)
    if (folder / ADAPTER_CONFIG).is_file():
        raise model_and_adapters(folder)
    read_model_type(folder)
    _check_complete(folder, weight_files(folder))
    _check_tensors(folder)


def check_adapters(folder: Path) -> None:
    """Check that a folder of peft's adapters has their weights, as safetensors that are not truncated.

    Raises:
        NotFoundError: they are missing, incomplete, or in another format.
    """
    if not (folder / ADAPTER_FILE).is_file():
        if (folder / "adapter_model.bin").is_file():
            raise adapters_in_bin(folder)
        raise NotFoundError(
            f"model.weights: {folder} has no {ADAPTER_FILE}",
            meaning="a copy was interrupted, or the training that writes it",
            fix="copy the adapters again, or give a folder that has them",
        )
    _check_complete(folder, [ADAPTER_FILE])


def _check_complete(folder: Path, files: Sequence[str]) -> None:
    if damaged := [file for file in files if not _is_complete(folder / file)]:
        raise NotFoundError(
            f"model.weights: {folder} has an incomplete {' and an incomplete '.join(damaged)}",
            meaning="a copy was interrupted, it contains only a Git LFS pointer, or this user has no read permission",
            fix="copy or download it again",
        )


def _check_tensors(folder: Path) -> None:
    """Check that the files have the tensors that the index lists, in dtypes that need no unknown scales."""
    stored = {file: _stored_tensors(folder / file) for file in weight_files(folder)}
    if not (folder / WEIGHTS_FILE).is_file():
        lacking = [name for name, file in read_index(folder).items() if name not in stored[file]]
        if lacking:
            raise NotFoundError(
                f"model.weights: {folder / WEIGHTS_INDEX} lists {', '.join(lacking[:3])}, which its file lacks",
                meaning="the index and the files belong to different versions of the model",
                fix="copy or download all of them again",
            )
    tensors = {name: tensor for each in stored.values() for name, tensor in each.items()}
    for name, tensor in tensors.items():
        dtype, _ = tensor.kind
        if name.endswith(".weight") and not (dtype in _FLOATS or (dtype in _SCALED and f"{name}_scale_inv" in tensors)):
            raise NotFoundError(
                f"model.weights: {folder} has '{name}' as {dtype} without scales that ftkit supports",
                meaning="the weights are quantized, but config.json does not say so",
                fix="use the unquantized version of the model",
            )


_FLOATS = ("BF16", "F16", "F32", "F64")
_SCALED = ("F8_E4M3",)
"""Names of dtypes in safetensors; `_SCALED` ones are dequantized by the `_scale_inv` tensor next to them."""


def holds_adapters(folder: Path) -> bool:
    """Return whether a folder has adapters without a model; some programs save the model's config.json with them."""
    has_model = any((folder / name).is_file() for name in (WEIGHTS_FILE, WEIGHTS_INDEX))
    return (folder / ADAPTER_CONFIG).is_file() and not has_model


def missing_files(folder: Path) -> list[str]:
    """Return the missing files of a model in Hugging Face's layout."""
    missing = [] if (folder / CONFIG_FILE).is_file() else [CONFIG_FILE]
    if not (folder / WEIGHTS_INDEX).is_file():
        return missing if (folder / WEIGHTS_FILE).is_file() else [*missing, f"{WEIGHTS_FILE} or {WEIGHTS_INDEX}"]
    try:
        return missing + [file for file in weight_files(folder) if not (folder / file).is_file()]
    except (ValueError, LookupError, TypeError, AttributeError):
        return [*missing, f"readable {WEIGHTS_INDEX}"]


def count_stored_values(folder: Path) -> list[int]:
    """Return the number of values of each tensor in a model's weight files; damaged files raise any exception."""
    return [math.prod(shape) for shape in read_stored_shapes(folder).values()]


def read_stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a model's weight files, from their headers; damaged files raise any error."""
    return {name: tensor.kind[1] for name, tensor in _tensors_of_model(folder).items()}


WRAPPED = "model.language_model."
"""Prefix of the text model in most multimodal models' classes."""

_TEXT_PREFIXES = {
    "language_model.model.": "model.",  # in files on the hub
    "language_model.lm_head.": "lm_head.",
    WRAPPED: "model.",  # in the class, and in files of some versions of transformers
    "model.text_model.": "model.",  # in Idefics 2 and 3, and SmolVLM
}


def text_name(stored: str) -> str:
    """Return the text model's name of a tensor in the files; other tensors keep their name."""
    for prefix, own in _TEXT_PREFIXES.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return stored


def stored_names(file: Path) -> set[str]:
    """Return the names of the tensors in a file of safetensors; empty if the file is missing or damaged."""
    try:
        return {*_stored_tensors(file)}
    except UNREADABLE:
        return set()


def stored_dtypes(file: Path) -> set[str]:
    """Return the dtypes of a file of safetensors, by the format's names; empty if the file is damaged."""
    try:
        return {tensor.kind[0] for tensor in _stored_tensors(file).values()}
    except UNREADABLE:
        return set()


def weight_files(folder: Path) -> list[str]:
    """Return the files with a model's weights: one, or those in the index; a damaged index raises any error.

    As in transformers, an index beside the one file has no effect: programs that save into a folder may leave it there.
    """
    if (folder / WEIGHTS_FILE).is_file() or not (folder / WEIGHTS_INDEX).is_file():
        return [WEIGHTS_FILE]
    return sorted(set(read_index(folder).values()))


def read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, from the index; a damaged one raises one of `UNREADABLE`.

    Raises:
        NotFoundError: it lists a file outside the folder, or one that can't exist.
    """
    places: dict[str, str] = load_json(read_small(folder / WEIGHTS_INDEX, MAX_JSON_BYTES))["weight_map"]
    for file in set(places.values()):
        parts = Path(file).parts
        if Path(file).is_absolute() or ".." in parts or "\0" in file or any(len(part) > _MAX_NAME for part in parts):
            raise NotFoundError(
                f"model.weights: {folder / WEIGHTS_INDEX} lists {file[:80]!r}, which is no file of this folder",
                meaning="the index was damaged or edited; ftkit reads only files within a model's folder",
                fix="copy or download the model again",
            )
    return places


def _is_complete(path: Path) -> bool:
    """Return whether a safetensors file is as long as its header says: the header's length, the header, the tensors."""
    try:
        end = max((tensor.end for tensor in _stored_tensors(path).values()), default=None)
        if end is None:
            with open_regular(path) as file:
                end = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")
        return path.stat().st_size == end
    except UNREADABLE:
        return False


UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError)
"""Exceptions that damaged safetensors files, and damaged indexes, raise."""


@dataclass(frozen=True)
class _StoredTensor:
    """Where a tensor is in a file of safetensors: bytes `begin` to `end`."""

    path: Path
    kind: tuple[str, tuple[int, ...]]
    begin: int
    end: int

    def equals(self, other: _StoredTensor) -> bool:
        """Compare dtype, shape and bytes."""
        if self.kind != other.kind:
            return False
        with self.path.open("rb") as one, other.path.open("rb") as two:
            one.seek(self.begin)
            two.seek(other.begin)
            for done in range(0, self.end - self.begin, _COMPARE_CHUNK_BYTES):
                size = min(_COMPARE_CHUNK_BYTES, self.end - self.begin - done)
                if one.read(size) != two.read(size):
                    return False
        return True


def _tensors_of_model(folder: Path) -> dict[str, _StoredTensor]:
    return {name: tensor for file in weight_files(folder) for name, tensor in _stored_tensors(folder / file).items()}


def _stored_tensors(path: Path) -> Mapping[str, _StoredTensor]:
    """Return the tensors of a file of safetensors, from its header, which is read again only if the file changed."""
    seen = path.stat()
    return _read_header(path, (seen.st_ino, seen.st_size, seen.st_mtime_ns))


@lru_cache(maxsize=256)  # files of the largest models
def _read_header(path: Path, _: tuple[int, int, int]) -> Mapping[str, _StoredTensor]:
    with open_regular(path) as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = load_json(file.read(min(length, _MAX_HEADER_BYTES)))
    header.pop("__metadata__", None)
    return {
        name: _StoredTensor(
            path,
            (entry["dtype"], tuple(entry["shape"])),
            *(LENGTH_BYTES + length + offset for offset in entry["data_offsets"]),
        )
        for name, entry in header.items()
    }


def _is_tied(folder: Path, config: Mapping[str, Any]) -> bool | None:
    """Return whether the output projection is tied to the embedding, from the files; None if unknown.

    As in transformers, a projection that differs from the embedding is never tied to it. A multimodal model's
    configuration may contradict that of its text model, and classes disagree on which of them counts.
    """
    text = config.get("text_config")
    declared = [part[_TIED] for part in (config, text) if isinstance(part, dict) and _TIED in part]
    try:
        tensors = _tensors_of_model(folder)
    except UNREADABLE:
        return None  # not downloaded yet; or damaged, which is refused elsewhere
    embeddings, projections = (
        [tensor for name, tensor in tensors.items() if f".{name}".endswith(f".{table}")]
        for table in (_EMBEDDING, _PROJECTION)
    )
    if len(embeddings) != 1:  # of a family with other names, or of several models
        return None
    if not projections:
        return any(declared) or None
    if declared and not any(declared):
        return False
    return None if projections[0].equals(embeddings[0]) else False


def read_model_type(folder: Path) -> str:
    """Return the architecture in a model's configuration: its `model_type`.

    Raises:
        NotFoundError: it can't be read, or has none.
    """
    return str(_read_config(folder)["model_type"])


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return a model's stored configuration, which has a `model_type`; embeddings are tied as in its files.

    Raises:
        NotFoundError: it can't be read, or has no `model_type`.
    """
    stored = _read_config(folder)
    if (is_tied := _is_tied(folder, stored)) is not None:
        stored[_TIED] = is_tied
        if isinstance(stored.get("text_config"), dict):
            stored["text_config"][_TIED] = is_tied
    return stored


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    stored = _read_json(path)
    if not isinstance(stored, dict) or not isinstance(stored.get("model_type"), str):
        raise NotFoundError(
            f"{path} has no model_type",
            meaning="it does not belong to a transformers model: other libraries use other layouts",
            fix="convert the model to transformers' layout, or choose another with model.weights",
        )
    return stored


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the generation settings of a model; empty if it has none.

    Raises:
        NotFoundError: it can't be read.
    """
    path = folder / GENERATION_FILE
    stored = _read_json(path) if path.is_file() else {}
    if not isinstance(stored, dict):
        raise NotFoundError(
            f"{path} is not a JSON object",
            meaning="a copy was interrupted, or the file was edited manually",
            fix="copy or download it again, or delete it",
        )
    return stored


def read_end_tokens(folder: Path) -> list[int]:
    """Return all end tokens in a model's files.

    The files disagree: for Gemma 3, one file has the end of a turn and another does not. If no file sets an end token,
    transformers' configurations have a default, which may be an ordinary token of this tokenizer; it is not used.

    Raises:
        NotFoundError: they can't be read.
    """
    config = _read_config(folder)
    text = config.get("text_config")
    sources = [read_generation_config(folder), config, text if isinstance(text, dict) else {}]
    values = [source.get("eos_token_id") for source in sources]
    tokens = [token for value in values for token in (value if isinstance(value, list) else [value])]
    return list(dict.fromkeys(token for token in tokens if type(token) is int and token >= 0))


def _read_json(path: Path) -> Any:
    log.debug("read %s", path)
    try:
        return load_json(read_small(path, MAX_JSON_BYTES))
    except (OSError, ValueError) as error:
        raise NotFoundError(
            f"can't read {path}: {error}",
            meaning="a copy was interrupted, or the file was edited manually",
            fix="copy or download it again: it must be a JSON object",
        ) from error
