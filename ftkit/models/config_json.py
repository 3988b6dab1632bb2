"""A model's config.json: the shape in it, and whether a recipe contradicts it.

Weights are trained with their own configuration. Keys that a published file leaves out have the defaults of the
family's class in transformers (`ftkit.models.families`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ftkit.errors import ConfigError, Problem
from ftkit.models.architecture import ArchitectureFields, ArchitectureSpec, ModelSpec
from ftkit.models.families import FAMILIES, MEASURED, TEXT_MODEL_TYPES, family_of
from ftkit.paths import is_path, neighbor_of

CONFIG_KEYS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window", "use_sliding_window",
    "layer_types", "tie_word_embeddings", "rope_theta", "rope_parameters", "rope_scaling", "rms_norm_eps",
    "initializer_range",
)  # fmt: skip
"""The keys of a configuration that are compared, in all spellings."""
_EQUAL = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings", "rope_theta", "rms_norm_eps",
)  # fmt: skip
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""The spellings of the number of routed experts."""
_PER_LAYER = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Sizes that some configurations list for each layer, as Gemma 3n's; the shape has the largest."""
FULL, WINDOWED, LINEAR = "full_attention", "sliding_attention", "linear_attention"  # types of layers


DEQUANTIZED_METHODS = ("mxfp4", "fp8")  # quantized weights that are dequantized while they are loaded


def why_not_dequantizable(config: Mapping[str, Any]) -> str | None:
    """Return why ftkit can't dequantize the weights of a raw configuration; None if it can or need not."""
    quantization = config.get("quantization_config") or text_part(config).get("quantization_config")
    if not isinstance(quantization, dict) or not quantization:
        return None
    method = quantization.get("quant_method")
    if method is None and (quantization.get("load_in_4bit") or quantization.get("load_in_8bit")):
        method = "bitsandbytes"
    if method == "fp8" and not quantization.get("weight_block_size"):
        return "the weights are quantized by 'fp8' without blocks, which ftkit does not dequantize"
    if method in DEQUANTIZED_METHODS:
        return None
    return f"the weights are quantized by '{method}', which ftkit does not dequantize"


_DTYPES = (
    "bfloat16", "float16", "half", "float32", "float", "float64", "double", "float8_e4m3fn", "float8_e5m2", "int8",
    "uint8",
)  # fmt: skip
"""Names of dtypes in torch that weights may have."""
_DTYPE_ABBREVIATIONS = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}


def check_loadable(config: Mapping[str, Any], weights: str) -> None:
    """Refuse (ConfigError) weights that ftkit does not dequantize, and a `dtype` that torch does not have."""
    where = f"config.json of {weights}"
    if (problem := why_not_dequantizable(config)) is not None:
        what = f"{problem}: fine-tuning starts from weights in bf16 or fp32."
        raise ConfigError([Problem(where, "model.weights", what, unquantized_fix(weights))])
    inner = config.get("text_config")
    for part, key in product((config, inner if isinstance(inner, dict) else {}), ("dtype", "torch_dtype")):
        value = part.get(key)
        if isinstance(value, str) and value not in _DTYPES:
            name = value.removeprefix("torch.").lower()
            name = _DTYPE_ABBREVIATIONS.get(name, name if name in _DTYPES else "bfloat16")
            what = f'its config.json has "{key}": "{value}", which torch does not have.'
            raise ConfigError([Problem(where, "model.weights", what, f'Write "{key}": "{name}" in config.json.')])


_QUANTIZED_NAME = re.compile(
    r"[-_](unsloth-bnb-4bit|bnb-4bit|[48]bit|int[48]|w4a16|w8a8|gptq|awq|fp8|nf4|mlx|gguf)\b.*", re.IGNORECASE
)


def unquantized_fix(weights: str) -> str:
    plain = _QUANTIZED_NAME.sub("", weights)
    named = f", most likely {plain}" if plain != weights and not is_path(weights) else ""
    return f"Use the unquantized version of the model{named}; training.method=qlora quantizes it to 4 bits."


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's part of a raw configuration: in a multimodal model's, `text_config`; else all of it."""
    inner, outer_type = config.get("text_config"), str(config.get("model_type"))
    if not isinstance(inner, dict):
        return config
    # The wrapper has `tie_word_embeddings`, and the text model's type may be implied by its class.
    outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    named = {"model_type": TEXT_MODEL_TYPES[outer_type]} if outer_type in TEXT_MODEL_TYPES else {}
    return named | inner | outer


def fill_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text part of a configuration with the family's defaults, if the family is known.

    Keys are spelled as in transformers 5. `layer_types` has one entry per layer if the number of layers is known.
    """
    text = text_part(config)
    family = family_of(str(text.get("model_type")))
    stored = {key: value for key, value in text.items() if value is not None or key == "sliding_window"}
    filled: dict[str, Any] = {**family.defaults, **stored}
    for key in _PER_LAYER:
        if isinstance(values := filled.get(key), list) and values and all(map(_is_count, values)):
            filled[key] = max(values)
    heads, hidden = filled.get("num_attention_heads"), filled.get("hidden_size")
    if filled.get("model_type") in FAMILIES and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        filled = {"num_key_value_heads": heads, "head_dim": hidden // heads} | filled
    rope = _of_full_attention(filled.get("rope_parameters"))
    if rope.get("rope_theta") is not None:
        filled["rope_theta"] = rope["rope_theta"]
    layers = filled.get("per_layer_config")  # Gemma 4's full-attention layers, in transformers 5's spelling
    first = next(iter(layers.values()), None) if isinstance(layers, dict) else None
    for key, own in {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}.items():
        if isinstance(first, dict) and key in first:
            filled[own] = first[key]
    if family.window_switch and not stored.get(family.window_switch):
        filled["sliding_window"] = None
    if not isinstance(filled.get("layer_types"), list):
        filled.pop("layer_types", None)
        if types := _layer_types(filled):
            filled["layer_types"] = types
    return filled


def _of_full_attention(rope: object) -> dict[str, Any]:
    """Return rope parameters: with several types of layers, each type has its own."""
    found = rope.get(FULL, rope) if isinstance(rope, dict) else None
    return found if isinstance(found, dict) else {}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _layer_types(filled: Mapping[str, Any]) -> list[str] | None:
    """Return the layer types of a family whose configuration does not list them; None if they are unknown."""
    layers, window = filled.get("num_hidden_layers"), filled.get("sliding_window")
    family = family_of(str(filled.get("model_type")))
    if not isinstance(layers, int) or not _is_count(layers) or not family.has_formula:
        return None
    every = family.full_attention_every
    for key in ("sliding_window_pattern", "full_attention_interval"):
        every = filled[key] if _is_count(filled.get(key)) else every
    if every:
        types = [FULL if (index + 1) % every == 0 else str(family.other_layers) for index in range(layers)]
        return [*types[:-1], FULL] if family.last_is_full else types
    if window is None:
        return [FULL] * layers
    first = filled.get("max_window_layers", 28) if family.window_switch else 0
    return [WINDOWED if not _is_count(first) or index >= first else FULL for index in range(layers)]


def resolve_shape(model: ModelSpec, config: Mapping[str, Any] | None) -> ArchitectureSpec:
    """Return the complete shape of a model: that of its configuration, with the recipe's overrides.

    `config` is the raw configuration of its weights; None if there is none, or if it can't be read from here. Raises
    ConfigError: the recipe contradicts the configuration, or neither defines the complete shape.
    """
    given = model.architecture
    if config is None and isinstance(given, ArchitectureSpec):
        least, has_formula = experts_per_token(given.family), family_of(given.family).has_formula
        if model.weights == "random" and has_formula and given.num_experts and not 0 < least <= given.num_experts:
            what = f"a token of an untrained '{given.family}' passes through {least or 'no'} experts."
            fix = "Raise it." if least else "Leave it out, or name another family."
            raise ConfigError([Problem("", "model.architecture.num_experts", what, fix)])
        return _with_more_positions(given, given)
    if config is None:
        fix = f"On a machine with network access: hf download {model.weights} config.json, or"
        if is_path(model.weights):
            neighbor = neighbor_of(Path(model.weights))
            fix = f"{neighbor[:1].upper()}{neighbor[1:]}Correct the path, or, if the folder exists only on the nodes,"
        what = f"the config.json of '{model.weights}' can't be read from here."
        raise ConfigError([Problem("", "model.weights", what, f"{fix} give the complete model.architecture.")])
    check_shape(given, config, model.weights)
    return _with_more_positions(read_shape(config, model.weights), given)


def read_shape(config: Mapping[str, Any], weights: str) -> ArchitectureSpec:
    """Return the shape in a configuration. Raises ConfigError: it is incomplete, or has impossible values."""
    filled = fill_config(config)
    window, every = _window_and_interval(filled)
    fields = {name: filled.get(name) for name in ArchitectureFields.model_fields if name != "rope_scaling"}
    known = fields | {
        "family": filled.get("model_type"),
        "num_experts": num_experts(filled) or None,
        "intermediate_size": filled.get("intermediate_size") or _width_of_experts(filled),
        "sliding_window": window,
        "full_attention_every": every,
    }
    try:
        return ArchitectureSpec.model_validate({key: value for key, value in known.items() if value is not None})
    except ValidationError as error:
        wrong = list(dict.fromkeys(str(detail["loc"][0]) for detail in error.errors() if detail["loc"]))
        what = f"it has no {', '.join(wrong) or 'possible shape'} that ftkit can use."
        fix = "Plan on a machine with torch and transformers, which fill in missing values; or choose another model."
        raise ConfigError([Problem(f"config.json of {weights}", "model.weights", what, fix)]) from error


def experts_per_token(family: str) -> int:
    """Return the experts that a token is routed to in a family's class by default; 0 if it has none or is unknown."""
    number = family_of(family).defaults.get("num_experts_per_tok")
    return number if isinstance(number, int) else 0


def num_experts(config: Mapping[str, object]) -> int:
    """Return the number of routed experts of a layer, under any known key; 0 without any."""
    values = (config.get(key) for key in NUM_EXPERTS)
    found = next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), 0)
    is_dense = found <= 1 or config.get("is_moe") is False or config.get("enable_moe_block") is False
    return 0 if is_dense else found


def _window_and_interval(filled: Mapping[str, Any]) -> tuple[int | None, int]:
    """Return the sliding window, and the interval of layers with full attention."""
    types, window = filled.get("layer_types"), filled.get("sliding_window")
    if not isinstance(types, list):
        return window, 1
    if window is None or WINDOWED not in types:
        return None, 1
    return window, types.index(FULL) + 1 if FULL in types else len(types) + 1


def _width_of_experts(filled: Mapping[str, Any]) -> int | None:
    """Return the total width of a token's experts, for a model with experts in every layer."""
    width, num = filled.get("moe_intermediate_size"), filled.get("num_experts_per_tok")
    if not (isinstance(width, int) and isinstance(num, int)):
        return None
    shared = filled.get("shared_expert_intermediate_size")
    return width * num + (shared if isinstance(shared, int) else 0)


def _with_more_positions(shape: ArchitectureSpec, given: ArchitectureFields) -> ArchitectureSpec:
    """Return a shape with the recipe's positions: fewer, or more with scaling."""
    positions, scaling = shape.max_position_embeddings, given.rope_scaling
    if scaling is not None:
        scaling = scaling.of_weights(positions)
        positions = scaling.positions
    wanted = given.max_position_embeddings
    # The positions of the weights, as a shipped shape has them, don't limit those that scaling adds.
    if wanted is not None and (scaling is None or wanted > shape.max_position_embeddings):
        positions = wanted
    return shape.model_copy(update={"max_position_embeddings": positions, "rope_scaling": scaling})


def check_shape(shape: ArchitectureFields, config: Mapping[str, Any], weights: str) -> None:
    """Refuse (ConfigError) a recipe's shape that contradicts the weights' configuration, which defines the model."""
    if found := find_contradictions(shape, config):
        where, fix = f"config.json of {weights}", "Correct the recipe, or leave it out."
        raise ConfigError([Problem(where, f"model.architecture.{key}", f"{each}.", fix) for key, each in found.items()])


def find_contradictions(shape: ArchitectureFields, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields in which a recipe's shape contradicts a configuration, each with both values."""
    filled = fill_config(config)
    stored = {key: value for key, value in filled.items() if key in CONFIG_KEYS and value is not None}
    given = {key: value for key in shape.model_fields_set if (value := getattr(shape, key)) is not None}
    pairs = {key: (given[key], stored[key]) for key in _EQUAL if key in stored and key in given}
    family = stored.get("model_type", shape.family)
    if "num_experts" in given:
        pairs["num_experts"] = (given["num_experts"], num_experts(filled))
    if "family" in given:
        pairs["family"] = (shape.family, family)
    window, every = _window_and_interval(stored)
    is_known = family_of(str(family)).has_formula or (window is not None and shape.sliding_window is not None)
    if "sliding_window" in shape.model_fields_set and is_known:
        pairs["sliding_window"] = (shape.sliding_window, window)
    if "full_attention_every" in given and family in MEASURED and isinstance(stored.get("layer_types"), list):
        pairs["full_attention_every"] = (shape.full_attention_every, every)
    found = {
        key: f"{_in_yaml(recipe)} in the recipe, {_in_yaml(weights)} in the weights"
        for key, (recipe, weights) in pairs.items()
        if recipe != weights
    }
    default = ArchitectureSpec.model_fields["initializer_range"].default
    if given.get("initializer_range", default) not in (default, stored.get("initializer_range")):
        found["initializer_range"] = f"{shape.initializer_range} has no effect on pretrained weights"
    return found | _positions(shape, given, stored)


def _positions(shape: ArchitectureFields, given: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, str]:
    """Return the contradictions about positions and rope scaling."""
    key, scaling = "max_position_embeddings", shape.rope_scaling
    there, wanted = stored.get(key), given.get(key)
    own = _of_full_attention(stored.get("rope_parameters") or stored.get("rope_scaling"))
    kind = own.get("rope_type") or own.get("type") or "default"
    if scaling is not None and kind != "default":
        trained = f"the weights were trained with {kind}, for {there} positions"
        return {"rope_scaling": f"{scaling.rope_type} in the recipe, {trained}"}
    if not isinstance(there, int) or not isinstance(wanted, int) or wanted <= there:
        return {}
    if scaling is None:
        return {key: f"{wanted} in the recipe, {there} in the weights (more need rope_scaling)"}
    most = scaling.of_weights(there).positions
    return {key: f"{wanted} in the recipe, {most} with a rope_scaling of {scaling.factor:g}"} if wanted > most else {}


def _in_yaml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
