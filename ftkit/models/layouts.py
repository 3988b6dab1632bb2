"""Recognize models that are not safetensors in Hugging Face's layout, and say how to get that layout."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

from ftkit.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_CONFIG_FILES: Final = ("config.json", "adapter_config.json")
_GGUF_FIX: Final = (
    "give the model that it was made of, in safetensors: its hub id, or its folder; training.method=qlora trains on it "
    "in 4 bits"
)
_MAX_SHOWN: Final = 3


def not_a_folder(file: Path) -> NotFoundError:
    """Return the error that a model is a file."""
    if file.suffix.lower() == ".gguf":
        return _gguf(file)
    has_config = any((file.parent / name).is_file() for name in _CONFIG_FILES)
    return NotFoundError(
        f"model.weights: {file} is a file",
        meaning="a model is a folder in Hugging Face's layout: config.json, tokenizer, and weights as safetensors",
        fix=f"give the folder: model.weights={file.parent}" if has_config else "give a folder that has these files",
    )


def incomplete(folder: Path, missing: Sequence[str]) -> NotFoundError:
    """Return the error that a folder lacks files, from the files that it has instead."""
    has_config = (folder / "config.json").is_file()
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


def model_and_adapters(folder: Path) -> NotFoundError:
    """Return the error that a folder has the weights of a model, and adapters as well."""
    return NotFoundError(
        f"model.weights: {folder} has a model, and adapters as well (adapter_config.json)",
        meaning="transformers would load the adapters on their own base model, and not this model",
        fix="move the adapters to a folder of their own, and give one of the two folders",
    )


def adapters_in_bin(folder: Path) -> NotFoundError:
    """Return the error that adapters are in a file of pickles."""
    convert = (
        "import torch, safetensors.torch as s; "
        f's.save_file(torch.load("{folder}/adapter_model.bin", weights_only=True), '
        f'"{folder}/adapter_model.safetensors")'
    )
    return NotFoundError(
        f"model.weights: {folder} has its adapters only as adapter_model.bin",
        meaning="ftkit reads safetensors, which can't run code",
        fix=f"convert them: python -c {shlex.quote(convert)}",
    )


def _gguf(file: Path) -> NotFoundError:
    return NotFoundError(
        f"model.weights: {file} is a model in GGUF, llama.cpp's format",
        meaning="its weights are usually quantized for inference; fine-tuning starts from weights in bf16 or fp32",
        fix=_GGUF_FIX,
    )


def _models_below(folder: Path) -> list[str]:
    """Return the folders below that have a model or adapters, the newest checkpoint last."""
    found = {path.parent for name in _CONFIG_FILES for path in folder.glob(f"*/{name}")}
    return [path.name for path in sorted(found, key=_checkpoint_number)]


def _checkpoint_number(path: Path) -> tuple[int, str]:
    number = path.name.rpartition("-")[2]
    return (int(number) if number.isdecimal() else -1, path.name)


def _merge_command(folder: Path) -> str | None:
    """Return the command that merges the shards of accelerate's FSDP or DeepSpeed's ZeRO; None if there are none."""
    if shards := next(folder.glob("pytorch_model_fsdp_*/.metadata"), None):
        return shlex.join(["accelerate", "merge-weights", str(shards.parent), str(folder)])
    if (script := folder / "zero_to_fp32.py").is_file():
        return shlex.join(["python", str(script), str(folder), str(folder), "--safe_serialization"])
    return None
