"""A folder with a model in Hugging Face's layout: check that it is complete, and read its configurations."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ftkit.errors import NotFoundError
from ftkit.files import MAX_JSON_BYTES, load_json, read_json_if_valid, read_small
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

log = logging.getLogger(__name__)

GENERATION_FILE = "generation_config.json"
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
"""Patterns of a model's other files: configurations, chat templates, and vocabularies in all forms."""
ADAPTER_CONFIG = "adapter_config.json"  # file of peft in a folder of adapters
ADAPTER_FILE = "adapter_model.safetensors"  # file of peft's weights in it
SENTENCEPIECE_FILE = "tokenizer.model"  # a SentencePiece model, from which `tokenizer.json` was made
ADDED_TOKENS_FILE = "added_tokens.json"  # tokens with their ids that are not in a SentencePiece model
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`, which reserves memory for adapters of that rank."""
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Files of a multimodal model's processor, of transformers 5 and of 4, and that of videos, which Qwen's loads too."""
EXPORT_RECORD = "ftkit-export.json"  # file of ftkit in an export, with the digests of its weights
_TIED = "tie_word_embeddings"
_MAX_SHOWN: Final = 3


def check_folder(folder: Path) -> None:
    """Raise NotFoundError unless a folder has a configuration, and safetensors that are not truncated."""
    if folder.is_file():
        if folder.suffix.lower() == ".gguf":
            raise _gguf(folder)
        has_config = any((folder.parent / name).is_file() for name in (CONFIG_FILE, ADAPTER_CONFIG))
        raise NotFoundError(
            f"model.weights: {folder} is a file",
            meaning="a model is a folder in Hugging Face's layout: config.json, tokenizer, and weights as safetensors",
            fix=f"give the folder: model.weights={folder.parent}" if has_config else "give a folder with these files",
        )
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
    files = weight_files(folder)
    _check_complete(folder, files)
    stored = {file: stored_tensors(folder / file) for file in files}
    if not (folder / WEIGHTS_FILE).is_file():
        lacking = [name for name, file in read_index(folder).items() if name not in stored[file]]
        if lacking:
            raise NotFoundError(
                f"model.weights: {folder / WEIGHTS_INDEX} lists {', '.join(lacking[:_MAX_SHOWN])}, which are not there",
                meaning="the index and the files belong to different versions of the model",
                fix="copy or download all of them again",
            )
    tensors = {name: tensor for each in stored.values() for name, tensor in each.items()}
    for name, tensor in tensors.items():
        dtype, _ = tensor.kind
        has_scales = dtype == "F8_E4M3" and f"{name}_scale_inv" in tensors
        if name.endswith(".weight") and not (dtype in ("BF16", "F16", "F32", "F64") or has_scales):
            raise NotFoundError(
                f"model.weights: {folder} has '{name}' as {dtype} without scales that ftkit supports",
                meaning="the weights are quantized, but config.json does not say so",
                fix="use the unquantized version of the model",
            )


def check_adapters(folder: Path) -> None:
    """Raise NotFoundError unless a folder of peft's adapters has their weights, as whole safetensors."""
    if not (folder / ADAPTER_FILE).is_file():
        raise NotFoundError(
            f"model.weights: {folder} has no {ADAPTER_FILE}",
            meaning="a copy was interrupted; or peft saved the adapters as adapter_model.bin, which can run code",
            fix="copy the adapters again; or load and save them with peft, which writes safetensors",
        )
    _check_complete(folder, [ADAPTER_FILE])


def _check_complete(folder: Path, files: Sequence[str]) -> None:
    if damaged := [file for file in files if not is_complete(folder / file)]:
        raise NotFoundError(
            f"model.weights: {folder} has an incomplete {' and an incomplete '.join(damaged)}",
            meaning="a copy was interrupted, it contains only a Git LFS pointer, or this user has no read permission",
            fix="copy or download it again",
        )


def holds_adapters(folder: Path) -> bool:
    """Return whether a folder has adapters without a model; some programs save the model's config.json with them."""
    has_model = any((folder / name).is_file() for name in (WEIGHTS_FILE, WEIGHTS_INDEX))
    return (folder / ADAPTER_CONFIG).is_file() and not has_model


def missing_files(folder: Path) -> list[str]:
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
    parts = (config, config.get("text_config"))
    declared = [part[_TIED] for part in parts if isinstance(part, dict) and _TIED in part]
    try:
        tensors = tensors_of_model(folder)
    except UNREADABLE:
        return None  # not downloaded yet; or damaged, which is refused elsewhere
    embeddings, projections = (
        [tensor for name, tensor in tensors.items() if f".{name}".endswith(table)]
        for table in (".embed_tokens.weight", ".lm_head.weight")
    )
    if len(embeddings) != 1:  # of a family with other names, or of several models
        return None
    if not projections:
        return any(declared) or None
    if declared and not any(declared):
        return False
    return None if projections[0].equals(embeddings[0]) else False


def read_model_type(folder: Path) -> str:
    """Return the architecture in a model's configuration; raise NotFoundError if it can't be read, or has none."""
    return str(_read_config(folder)["model_type"])


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return a model's configuration, in which embeddings are tied as in its files; raise like `read_model_type`."""
    stored = _read_config(folder)
    if (is_tied := _is_tied(folder, stored)) is not None:
        stored[_TIED] = is_tied
        if isinstance(stored.get("text_config"), dict):
            stored["text_config"][_TIED] = is_tied
    return stored


def read_processor(folder: Path) -> dict[str, Any]:
    """Return the configuration of a multimodal model's processor of pictures; empty without one."""
    whole, own = (read_json_if_valid(folder / name, dict[str, Any]) or {} for name in PROCESSOR_FILES[:2])
    part = whole.get("image_processor")
    return {**whole, **(part if isinstance(part, dict) else {}), **own}


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    stored = _read_json(path)
    if not isinstance(stored.get("model_type"), str):
        raise NotFoundError(
            f"{path} has no model_type",
            meaning="it does not belong to a transformers model: other libraries use other layouts",
            fix="convert the model to transformers' layout, or choose another with model.weights",
        )
    return stored


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a folder of peft's adapters; raise NotFoundError if it can't be read."""
    return _read_json(folder / ADAPTER_CONFIG)


def max_lora_rank(folder: Path) -> int:
    """Return vLLM's `max_lora_rank` for the adapters of a folder, or their rank if it is too large; 0 without any."""
    rank = int(read_adapter_config(folder)["r"]) if holds_adapters(folder) else 0
    return next((each for each in (0, *VLLM_LORA_RANKS) if each >= rank), rank)


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the generation settings of a model, empty if it has none; raise NotFoundError if they can't be read."""
    path = folder / GENERATION_FILE
    return _read_json(path) if path.is_file() else {}


def read_end_tokens(folder: Path) -> list[int]:
    """Return all end tokens in a model's files.

    The files disagree: for Gemma 3, one file has the end of a turn and another does not. If no file sets an end token,
    transformers' configurations have a default, which may be an ordinary token of this tokenizer; it is not used.
    """
    config = _read_config(folder)
    text = config.get("text_config")
    sources = [read_generation_config(folder), config, text if isinstance(text, dict) else {}]
    values = [source.get("eos_token_id") for source in sources]
    tokens = [token for value in values for token in (value if isinstance(value, list) else [value])]
    return list(dict.fromkeys(token for token in tokens if type(token) is int and token >= 0))


def _read_json(path: Path) -> dict[str, Any]:
    log.debug("read %s", path)
    try:
        return dict(load_json(read_small(path, MAX_JSON_BYTES)))
    except (OSError, ValueError, TypeError) as error:
        raise NotFoundError(
            f"can't read {path}: {error}",
            meaning="a copy was interrupted, or the file was edited manually",
            fix="copy or download it again: it must be a JSON object",
        ) from error


def _incomplete(folder: Path, missing: Sequence[str]) -> NotFoundError:
    """Return the error that a folder lacks files, from the files that it has instead."""
    has_config = (folder / CONFIG_FILE).is_file()
    if has_config and any(folder.glob("pytorch_model*.bin")):
        return NotFoundError(
            f"model.weights: {folder} has its weights only as pytorch_model.bin",
            meaning="ftkit reads safetensors, from which each process loads its part, and which can't run code",
            fix="convert them: python -c 'from transformers import AutoModelForCausalLM as M; "
            f'M.from_pretrained("{folder}", dtype="auto").save_pretrained("{folder}")\'',
        )
    if any(folder.glob("pytorch_model_fsdp_*/.metadata")) or (folder / "zero_to_fp32.py").is_file():
        return NotFoundError(
            f"model.weights: {folder} is a checkpoint whose weights are in the shards of a trainer",
            meaning="ftkit reads whole tensors from safetensors",
            fix="merge the shards on a machine that you trust them on: 'accelerate merge-weights' for FSDP, "
            "'python zero_to_fp32.py . . --safe_serialization' for DeepSpeed",
        )
    if gguf := sorted(folder.glob("*.gguf")):
        return _gguf(gguf[0])
    below = {path.parent for name in (CONFIG_FILE, ADAPTER_CONFIG) for path in folder.glob(f"*/{name}")}
    if below and not has_config:
        newest = sorted(below, key=lambda path: (len(path.name), path.name))[-_MAX_SHOWN:]
        return NotFoundError(
            f"model.weights: {folder} has no model, but folders with models: {', '.join(each.name for each in newest)}",
            meaning="it is the output folder of a trainer, or a folder of several models",
            fix=f"give one of them: model.weights={newest[-1]}",
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
