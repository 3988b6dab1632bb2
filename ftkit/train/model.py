"""Build the model: its configuration, its class, and where its decoder layers are."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from ftkit.errors import TrainingError

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.specs.model import ArchitectureSpec, ModelSpec

_WINDOWED = ("gemma3_text", "olmo3")


def make_config(shape: ArchitectureSpec, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Make the Hugging Face configuration of an architecture, for a model without weights of its own."""
    fields = shape.model_dump(exclude={"family", "sliding_window", "full_attention_every"})
    if shape.family in _WINDOWED:
        every, layers = shape.full_attention_every, shape.num_hidden_layers
        fields["sliding_window"] = shape.sliding_window or shape.max_position_embeddings
        fields["layer_types"] = [
            "full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(layers)
        ]
    return AutoConfig.for_model(
        shape.family,
        **fields,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


@dataclass(frozen=True)
class TextConfig:
    """The configuration of a text model, and whether a multimodal one was wrapped around it where it came from."""

    text: PretrainedConfig
    is_wrapped: bool = False


def read_config(folder: Path, shape: ArchitectureSpec) -> TextConfig:
    """Read the configuration that lies beside the weights; of a multimodal model's, the text part.

    Raises:
        TrainingError: it is not of the shape that the plan was made for.
    """
    stored = AutoConfig.from_pretrained(folder)
    config = stored.get_text_config(decoder=True)
    compared = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    wrong = [
        f"{key}: {getattr(shape, key)} in the recipe, {getattr(config, key, None)} in the weights"
        for key in compared
        if getattr(shape, key) != getattr(config, key, None)
    ]
    if wrong:
        raise TrainingError(
            f"the weights in {folder} are of another shape than model.architecture: {'; '.join(wrong)}",
            meaning="the plan's memory and speed are for another model",
            fix="correct model.architecture in the recipe",
        )
    return TextConfig(config, is_wrapped=config is not stored)


def build_empty(config: PretrainedConfig, attention: str) -> nn.Module:
    """Build a model whose parameters take no memory yet; its buffers are real."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    model.tie_weights()  # emptying gave each name a parameter of its own, which would be sharded twice
    return _prepared(model)


def _prepared(model: Any) -> nn.Module:
    # A cache would make transformers overlook the borders of packed documents: they would see each other.
    model.config.use_cache = False
    result: nn.Module = model.train()
    return result


def find_decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers: the longest list of modules of one type that the model holds.

    Found by structure, never by a name, so that a renamed class can't leave a model in one piece.

    Raises:
        TrainingError: the model is not built of such layers.
    """
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1
    ]
    expected = getattr(model.config, "num_hidden_layers", None)
    matching = [layers for layers in lists if len(layers) == expected]
    if not matching:
        found = ", ".join(f"{len(layers)} x {type(layers[0]).__name__}" for layers in lists) or "none"
        raise TrainingError(
            f"the model's {expected} decoder layers were not found; lists of equal modules in it: {found}",
            meaning="this model is not a plain decoder",
            fix="choose a model of a family that ftkit knows",
        )
    return max(matching, key=lambda layers: sum(parameter.numel() for parameter in layers[0].parameters()))


def has_random_weights(model: ModelSpec) -> bool:
    """Tell whether a recipe trains from nothing."""
    return model.weights == "random"


def plain_config(config: PretrainedConfig, class_name: str, dtype: torch.dtype) -> PretrainedConfig:
    """Return the configuration to export: the model's own class name, and a cache for inference."""
    exported = copy.deepcopy(config)
    exported.architectures = [class_name]
    exported.use_cache = True
    exported.dtype = dtype
    return exported
