"""Export the trained model: in Hugging Face's format, or peft's for adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from ftkit.config.recipe import RecipePlan
from ftkit.files import atomic_folder, mode_of_new_files
from ftkit.train.components.generation import Generation, end_token_setting
from ftkit.train.dtypes import DTYPES
from ftkit.train.model.build import TextConfig, config_for_export
from ftkit.train.model.lora import ADAPTER_FILE, peft_config, to_peft_names
from ftkit.train.model.weight_conversion import split_as_stored, wrapped_name, wrapped_targets

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from ftkit.train.engine import Engine
    from ftkit.train.world import World


@dataclass(frozen=True)
class ExportedParts:
    """Everything of an exported model besides its weights."""

    recipe: RecipePlan
    config: TextConfig
    class_name: str
    tokenizer: PreTrainedTokenizerBase
    generation: Generation


def export(engine: Engine, parts: ExportedParts, folder: Path, world: World) -> None:
    """Write weights, configurations and tokenizer into a folder, in the precision of training.

    Collective: every rank must call it. The folder appears complete, and replaces a former export.
    """
    weights = engine.trained_weights()
    if world.is_first:
        dtype = DTYPES[parts.recipe.training.compute_precision]
        converted = {name: _as_stored(tensor, dtype) for name, tensor in weights.items()}
        with atomic_folder(folder, folder.with_name(f".{folder.name}.partial")) as temporary:
            if parts.recipe.training.adapters is None:
                _write_model(split_as_stored(engine.model.hf_model, converted), parts, temporary)
            else:
                _write_adapters(converted, parts, temporary)
            parts.tokenizer.save_pretrained(temporary)
            parts.generation.save(temporary)
            _let_others_read(temporary)
    world.barrier()


def _as_stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor that owns all of its storage, as safetensors requires.

    Where the number of ranks does not divide the rows, a gathered tensor is a view of a larger one.
    """
    stored = tensor.to(dtype).contiguous()
    return stored if stored.untyped_storage().nbytes() == stored.nbytes else stored.clone()


def _let_others_read(folder: Path) -> None:
    """Give all files the mode of new files: safetensors makes its files private, whatever the umask is."""
    mode = mode_of_new_files(folder)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _write_model(weights: Mapping[str, torch.Tensor], parts: ExportedParts, folder: Path) -> None:
    """Write what `AutoModelForCausalLM.from_pretrained` loads: the text model, also of a multimodal one."""
    config = parts.config.text
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    save_torch_state_dict({name: tensor for name, tensor in weights.items() if name not in tied}, folder)
    dtype = next(iter(weights.values())).dtype
    end_tokens = end_token_setting(parts.generation.end_tokens)
    config_for_export(config, parts.class_name, dtype, end_tokens).save_pretrained(folder)


def _write_adapters(weights: dict[str, torch.Tensor], parts: ExportedParts, folder: Path) -> None:
    """Write what `PeftModel.from_pretrained` loads on top of the pretrained model, which may be multimodal."""
    lora = parts.recipe.training.adapters
    if lora is None:
        raise AssertionError("there are adapters to write, or the whole model is written")
    name_of = wrapped_name if parts.config.is_wrapped else str
    named = to_peft_names({name_of(name): tensor for name, tensor in weights.items()})
    save_file(named, folder / ADAPTER_FILE, metadata={"format": "pt"})
    config = peft_config(lora, base=parts.recipe.model.weights)
    if parts.config.is_wrapped:
        config.target_modules = wrapped_targets(lora.targets)
    config.save_pretrained(str(folder))
