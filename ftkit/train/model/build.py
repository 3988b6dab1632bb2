"""Build the model: its configuration, its class, and where its decoder layers are."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from ftkit.config.model import NEVER_WINDOWED, ArchitectureSpec
from ftkit.config.model_config import CONFIG_KEYS, find_contradictions
from ftkit.errors import TrainingError, in_short
from ftkit.model_folder import CONFIG_FILE, read_model_type

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.config.model import ModelSpec


_NDIM_OF_STACKED_EXPERTS = 3
_NUMBERS_IN_16_BYTES = 8
_PASSED_ON = set(ArchitectureSpec.model_fields) - {"family", "sliding_window", "full_attention_every"}


def make_config(shape: ArchitectureSpec, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Make the Hugging Face configuration of an architecture, for a model without weights of its own.

    What only its family has stays as transformers has it.

    Raises:
        TrainingError: transformers knows no such family.
    """
    fields = shape.model_dump(include=_PASSED_ON) | _windows(shape)
    try:
        return AutoConfig.for_model(
            shape.family,
            **fields,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    except ValueError as error:
        raise TrainingError(
            f"transformers {transformers.__version__} can't configure a '{shape.family}': {in_short(error)}",
            meaning="the name is not a model_type, or only a newer version knows it",
            fix="correct model.architecture.family, or take an image with a newer transformers",
        ) from error


def _windows(shape: ArchitectureSpec) -> dict[str, Any]:
    """Return the fields that say how far each layer looks back, of families that may have them."""
    if shape.family in NEVER_WINDOWED:
        return {}
    if shape.is_estimated and shape.sliding_window is None:
        return {"sliding_window": None}
    return {
        "sliding_window": shape.sliding_window or shape.max_position_embeddings,
        "layer_types": shape.layer_types,
    }


@dataclass(frozen=True)
class TextConfig:
    """The configuration of a text model, and whether a multimodal one was wrapped around it where it came from."""

    text: PretrainedConfig
    is_wrapped: bool = False


def read_config(folder: Path, shape: ArchitectureSpec) -> TextConfig:
    """Read the configuration that lies beside the weights; of a multimodal model's, the text part.

    Raises:
        NotFoundError: it can't be read, or says nothing of an architecture.
        TrainingError: transformers can't take it, or it is not of the shape that the plan was made for.
    """
    stored = _read_stored(folder)
    config = stored.get_text_config(decoder=True)
    found = find_contradictions(shape, {key: getattr(config, key, None) for key in CONFIG_KEYS})
    wrong = [f"{key}: {values}" for key, values in found.items()]
    if wrong:
        raise TrainingError(
            f"the weights in {folder} are of another shape than model.architecture: {'; '.join(wrong)}",
            meaning="what is trained is what the weights' own configuration says; the plan is for another model",
            fix="correct model.architecture in the recipe",
        )
    return TextConfig(config, is_wrapped=config is not stored)


def _read_stored(folder: Path) -> PretrainedConfig:
    model_type, version = read_model_type(folder), transformers.__version__
    if model_type not in CONFIG_MAPPING:
        raise TrainingError(
            f"transformers {version} knows no architecture '{model_type}', which {folder / CONFIG_FILE} names",
            meaning="only a newer version knows it, or it comes with code of its own, which is never run",
            fix="take an image with a newer transformers, or choose another model",
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # what odd values raise is up to each architecture and version
        raise TrainingError(
            f"transformers {version} can't take {folder / CONFIG_FILE} for a '{model_type}': {in_short(error)}",
            meaning="the file was changed by hand, or is of another version of the architecture",
            fix="correct it, or copy or download it again",
        ) from error


def build_empty(config: PretrainedConfig, attention: str) -> nn.Module:
    """Build a model whose parameters take no memory yet; its buffers are real.

    Raises:
        TrainingError: it is no causal language model that takes packed documents through this attention kernel.
    """
    try:
        with init_empty_weights(include_buffers=False):
            built = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    except ValueError as error:
        raise TrainingError(
            f"transformers {transformers.__version__} can't build a '{config.model_type}' with attention "
            f"'{attention}': {in_short(error)}",
            meaning="it is not a causal language model, or its class does not know this attention kernel",
            fix="set training.attention=auto, or choose another model",
        ) from error
    built.tie_weights()  # a parameter that took its memory from another is an object of its own again
    _check_takes_packs(built)
    _compute_odd_experts_one_by_one(built)
    return _prepared(built)


def _compute_odd_experts_one_by_one(model: Any) -> None:
    """Leave grouped matrix products to experts that they can take: rows of whole 16 bytes, in bf16 8 numbers."""
    stacked = [
        parameter.shape
        for name, parameter in model.named_parameters()
        if ".experts." in name and parameter.ndim == _NDIM_OF_STACKED_EXPERTS
    ]
    is_odd = any(size % _NUMBERS_IN_16_BYTES for shape in stacked for size in shape[1:])
    if is_odd and hasattr(model, "set_experts_implementation"):  # transformers 4 has them one by one
        model.set_experts_implementation("eager")


def _check_takes_packs(model: Any) -> None:
    """Refuse a model whose decoder can't be told where documents begin, by positions or by borders for kernels."""
    decoder = find_decoder(model)
    taken = inspect.signature(decoder.forward).parameters.values()
    takes_more = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken)
    if decoder is model or not takes_more or not any(each.name == "position_ids" for each in taken):
        raise TrainingError(
            f"{type(decoder).__name__} does not take the positions of packed documents",
            meaning="it keeps no track of positions, or its class in transformers is of an older kind",
            fix="choose another model, or an image with a newer transformers",
        )


def _prepared(model: Any) -> nn.Module:
    # A cache would make transformers overlook the borders of packed documents: they would see each other.
    model.config.use_cache = False
    result: nn.Module = model.train()
    return result


def find_decoder(model: Any) -> Any:
    """Return what is under the output projection; transformers 4 has some whole models under one of its two names."""
    decoder = model.get_decoder()
    return model.base_model if decoder is model else decoder


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


def plain_config(
    config: PretrainedConfig, class_name: str, dtype: torch.dtype, end_tokens: int | list[int] | None
) -> PretrainedConfig:
    """Return the configuration to export: the model's own class name, where its answers end, a cache for inference."""
    exported = copy.deepcopy(config)
    exported.architectures = [class_name]
    exported.use_cache = True
    exported.dtype = dtype
    exported.eos_token_id = end_tokens
    return exported
