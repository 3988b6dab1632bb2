"""A folder with a model in Hugging Face's layout: whether it is whole, and what it says of itself."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

from ftkit.errors import NotFoundError

if TYPE_CHECKING:
    from pathlib import Path

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHTS_INDEX = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
"""Of peft: in a folder of adapters."""
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's `max_lora_rank` can be: it makes room for adapters of that rank."""
EXPORT_RECORD = "ftkit-export.json"
"""Of ftkit: in an export, with the digests of its weights."""
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


def check_folder(folder: Path) -> None:
    """Check that a folder of weights is there, with a configuration and safetensors of their whole length.

    Raises:
        NotFoundError: it is not.
    """
    if not folder.is_dir():
        raise NotFoundError(
            f"model.weights: there is no folder {folder} on {socket.gethostname()}",
            meaning="the path is wrong, or its file system is not mounted there",
            fix="give the right path: model.weights=PATH",
        )
    missing = missing_files(folder)
    if missing:
        raise NotFoundError(
            f"model.weights: {folder} has no {' and no '.join(missing)}",
            meaning="its weights are of another format, or a copy was interrupted",
            fix="give a folder in Hugging Face's layout, with weights as safetensors",
        )
    read_model_type(folder)
    damaged = [file for file in _weights_files(folder) if not _is_whole(folder / file)]
    if damaged:
        raise NotFoundError(
            f"model.weights: {folder} has no whole {' and no whole '.join(damaged)}",
            meaning="a copy was interrupted, it holds Git LFS's pointer alone, or this user may not read it",
            fix="copy or download it again",
        )


def holds_adapters(folder: Path) -> bool:
    """Tell whether a folder holds adapters without a model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG_FILE).is_file()


def missing_files(folder: Path) -> list[str]:
    """Return what a folder lacks of a model in Hugging Face's layout."""
    missing = [] if (folder / CONFIG_FILE).is_file() else [CONFIG_FILE]
    if not (folder / WEIGHTS_INDEX).is_file():
        return missing if (folder / WEIGHTS_FILE).is_file() else [*missing, f"{WEIGHTS_FILE} or {WEIGHTS_INDEX}"]
    try:
        return missing + [file for file in _weights_files(folder) if not (folder / file).is_file()]
    except (ValueError, LookupError, TypeError, AttributeError):
        return [*missing, f"readable {WEIGHTS_INDEX}"]


def _weights_files(folder: Path) -> list[str]:
    index = folder / WEIGHTS_INDEX
    if not index.is_file():
        return [WEIGHTS_FILE]
    return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))


def _is_whole(path: Path) -> bool:
    """Tell whether a file of safetensors is as long as its header says: 8 bytes of length, the header, the tensors."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return bool(path.stat().st_size == 8 + length + max(ends, default=0))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def read_model_type(folder: Path) -> str:
    """Return which architecture a model's configuration names, in transformers' words.

    Raises:
        NotFoundError: it can't be read, or names none.
    """
    return str(read_model_config(folder)["model_type"])


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return a model's configuration as it is stored, which has a `model_type`.

    Raises:
        NotFoundError: it can't be read, or names no architecture.
    """
    path = folder / CONFIG_FILE
    stored = _read_json(path)
    if not isinstance(stored, dict) or not isinstance(stored.get("model_type"), str):
        raise NotFoundError(
            f"{path} has no model_type",
            meaning="it is not a model's that transformers reads: those of other libraries are laid out otherwise",
            fix="convert the model to transformers' layout, or choose another with model.weights",
        )
    return stored


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return what the model's makers recommend for generation; empty if they recommend nothing.

    Raises:
        NotFoundError: it can't be read.
    """
    path = folder / GENERATION_FILE
    stored = _read_json(path) if path.is_file() else {}
    if not isinstance(stored, dict):
        raise NotFoundError(
            f"{path} is not a JSON object",
            meaning="a copy was interrupted, or the file was changed by hand",
            fix="copy or download it again, or delete it",
        )
    return stored


def read_end_tokens(folder: Path) -> list[int]:
    """Return every token that ends the model's texts or answers, by its own files.

    They disagree: of Gemma 3, one has the end of a turn and another has not; in transformers' configurations, one
    that no file sets has a default, which may be an ordinary token of this tokenizer.

    Raises:
        NotFoundError: they can't be read.
    """
    config = read_model_config(folder)
    text = config.get("text_config")
    sources = [read_generation_config(folder), config, text if isinstance(text, dict) else {}]
    values = [source.get("eos_token_id") for source in sources]
    tokens = [token for value in values for token in (value if isinstance(value, list) else [value])]
    return list(dict.fromkeys(token for token in tokens if type(token) is int and token >= 0))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise NotFoundError(
            f"can't read {path}: {error}",
            meaning="a copy was interrupted, or the file was changed by hand",
            fix="copy or download it again: it is one JSON object",
        ) from error
