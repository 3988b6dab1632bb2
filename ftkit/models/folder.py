"""A folder with a model in Hugging Face's layout: check that it is complete, and read its configurations."""

from __future__ import annotations

import logging
import shlex
import socket
from typing import TYPE_CHECKING, Any, Final

from ftkit.errors import NotFoundError
from ftkit.files import MAX_JSON_BYTES, load_json, read_small
from ftkit.models.weight_files import (
    CONFIG_FILE,
    UNREADABLE,
    WEIGHTS_FILE,
    WEIGHTS_INDEX,
    is_complete,
    read_index,
    stored_tensors,
    tensors_of_model,
    weight_files,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

GENERATION_FILE = "generation_config.json"
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
_TIED = "tie_word_embeddings"
_EMBEDDING, _PROJECTION = "embed_tokens.weight", "lm_head.weight"
"""Suffixes of the names of the two tables that may be tied."""


def check_folder(folder: Path) -> None:
    """Check that a folder of weights exists, with a configuration and safetensors that are not truncated.

    Raises:
        NotFoundError: it is missing, incomplete, or in another format.
    """
    if folder.is_file():
        raise _not_a_folder(folder)
    if not folder.is_dir():
        raise NotFoundError(
            f"model.weights: there is no folder {folder} on {socket.gethostname()}",
            meaning="the path is wrong, or its file system is not mounted there",
            fix="give the right path: model.weights=PATH",
        )
    if missing := missing_files(folder):
        raise _incomplete(folder, missing)
    if (folder / ADAPTER_CONFIG).is_file():
        raise NotFoundError(
            f"model.weights: {folder} has a model, and adapters as well ({ADAPTER_CONFIG})",
            meaning="transformers would load the adapters on their own base model, and not this model",
            fix="move the adapters to a folder of their own, and give one of the two folders",
        )
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
            convert = (
                "import torch, safetensors.torch as s; "
                f's.save_file(torch.load("{folder}/adapter_model.bin", weights_only=True), "{folder}/{ADAPTER_FILE}")'
            )
            raise NotFoundError(
                f"model.weights: {folder} has its adapters only as adapter_model.bin",
                meaning="ftkit reads safetensors, which can't run code",
                fix=f"convert them: python -c {shlex.quote(convert)}",
            )
        raise NotFoundError(
            f"model.weights: {folder} has no {ADAPTER_FILE}",
            meaning="a copy was interrupted, or the training that writes it",
            fix="copy the adapters again, or give a folder that has them",
        )
    _check_complete(folder, [ADAPTER_FILE])


def _check_complete(folder: Path, files: Sequence[str]) -> None:
    if damaged := [file for file in files if not is_complete(folder / file)]:
        raise NotFoundError(
            f"model.weights: {folder} has an incomplete {' and an incomplete '.join(damaged)}",
            meaning="a copy was interrupted, it contains only a Git LFS pointer, or this user has no read permission",
            fix="copy or download it again",
        )


def _check_tensors(folder: Path) -> None:
    """Check that the files have the tensors that the index lists, in dtypes that need no unknown scales."""
    stored = {file: stored_tensors(folder / file) for file in weight_files(folder)}
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


def _is_tied(folder: Path, config: Mapping[str, Any]) -> bool | None:
    """Return whether the output projection is tied to the embedding, from the files; None if unknown.

    As in transformers, a projection that differs from the embedding is never tied to it. A multimodal model's
    configuration may contradict that of its text model, and classes disagree on which of them counts.
    """
    text = config.get("text_config")
    declared = [part[_TIED] for part in (config, text) if isinstance(part, dict) and _TIED in part]
    try:
        tensors = tensors_of_model(folder)
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


# --- Errors about other layouts, with how to get Hugging Face's --------------------------------------

_MAX_SHOWN: Final = 3


def _not_a_folder(file: Path) -> NotFoundError:
    """Return the error that a model is a file."""
    if file.suffix.lower() == ".gguf":
        return _gguf(file)
    has_config = any((file.parent / name).is_file() for name in (CONFIG_FILE, ADAPTER_CONFIG))
    return NotFoundError(
        f"model.weights: {file} is a file",
        meaning="a model is a folder in Hugging Face's layout: config.json, tokenizer, and weights as safetensors",
        fix=f"give the folder: model.weights={file.parent}" if has_config else "give a folder that has these files",
    )


def _incomplete(folder: Path, missing: Sequence[str]) -> NotFoundError:
    """Return the error that a folder lacks files, from the files that it has instead."""
    has_config = (folder / CONFIG_FILE).is_file()
    if any(folder.glob("pytorch_model*.bin")) and has_config:
        return NotFoundError(
            f"model.weights: {folder} has its weights only as pytorch_model.bin",
            meaning="ftkit reads safetensors, from which each process loads its part, and which can't run code",
            fix="convert them: python -c 'from transformers import AutoModelForCausalLM as M; "
            f'M.from_pretrained("{folder}", dtype="auto").save_pretrained("{folder}")\'',
        )
    if merge := _merge_command(folder):
        return NotFoundError(
            f"model.weights: {folder} is a checkpoint whose weights are in the shards of a trainer",
            meaning="ftkit reads whole tensors from safetensors",
            fix=f"merge the shards on a machine that you trust them on: {merge}",
        )
    if gguf := next(iter(sorted(folder.glob("*.gguf"))), None):
        return _gguf(gguf)
    if not has_config and (below := _models_below(folder)):
        shown = ", ".join(below[-_MAX_SHOWN:])
        return NotFoundError(
            f"model.weights: {folder} has no model, but {'folders with models' if below[1:] else 'a folder with one'}: "
            f"{shown}{' and others' if len(below) > _MAX_SHOWN else ''}",
            meaning="it is the output folder of a trainer, or a folder of several models",
            fix=f"give one of them: model.weights={folder / below[-1]}",
        )
    return NotFoundError(
        f"model.weights: {folder} has no {' and no '.join(missing)}",
        meaning="its weights have another format, or a copy was interrupted",
        fix="give a folder in Hugging Face's layout, with weights as safetensors",
    )


def _gguf(file: Path) -> NotFoundError:
    return NotFoundError(
        f"model.weights: {file} is a model in GGUF, llama.cpp's format",
        meaning="its weights are usually quantized for inference; fine-tuning starts from weights in bf16 or fp32",
        fix="give the model that it was made of, in safetensors: its hub id, or its folder; "
        "training.method=qlora trains on it in 4 bits",
    )


def _models_below(folder: Path) -> list[str]:
    """Return the folders below that have a model or adapters, the newest checkpoint last."""

    def checkpoint_number(path: Path) -> tuple[int, str]:
        number = path.name.rpartition("-")[2]
        return (int(number) if number.isdecimal() else -1, path.name)

    found = {path.parent for name in (CONFIG_FILE, ADAPTER_CONFIG) for path in folder.glob(f"*/{name}")}
    return [path.name for path in sorted(found, key=checkpoint_number)]


def _merge_command(folder: Path) -> str | None:
    """Return the command that merges the shards of accelerate's FSDP or DeepSpeed's ZeRO; None if there are none."""
    if shards := next(folder.glob("pytorch_model_fsdp_*/.metadata"), None):
        return shlex.join(["accelerate", "merge-weights", str(shards.parent), str(folder)])
    if (script := folder / "zero_to_fp32.py").is_file():
        return shlex.join(["python", str(script), str(folder), str(folder), "--safe_serialization"])
    return None
