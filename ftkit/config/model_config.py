"""Compare the shape in a recipe with the `config.json` beside the weights, which is what is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftkit.config.model import FAMILIES, NEVER_WINDOWED, ArchitectureSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_KEYS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window", "use_sliding_window",
    "layer_types", "tie_word_embeddings", "rope_theta", "rope_parameters", "rms_norm_eps", "initializer_range",
)  # fmt: skip
"""The keys of a configuration that are compared, in all spellings."""
_EQUAL = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings", "rope_theta", "rms_norm_eps",
)  # fmt: skip


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's part of a raw configuration; of a multimodal model's, that is one of its values."""
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return config
    # The wrapper says whether the tables are tied, and the text model's type may be left to its class.
    outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return outer | inner


def find_contradictions(shape: ArchitectureSpec, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields in which a shape contradicts the configuration of weights, each with both values.

    Args:
        shape: the recipe's.
        config: the text part, raw or with the defaults filled in. What it does not tell is not compared.
    """
    told = {key: config[key] for key in CONFIG_KEYS if config.get(key) is not None}
    told |= _derived(told)
    found = {
        key: f"{getattr(shape, key)} in the recipe, {told[key]} in the weights"
        for key in _EQUAL
        if key in told and getattr(shape, key) != told[key]
    }
    if told.get("model_type", shape.family) != shape.family:
        found["family"] = f"{shape.family} in the recipe, {told['model_type']} in the weights"
    positions = told.get("max_position_embeddings")
    if isinstance(positions, int) and shape.max_position_embeddings > positions:
        found["max_position_embeddings"] = f"{shape.max_position_embeddings} in the recipe, {positions} in the weights"
    default = ArchitectureSpec.model_fields["initializer_range"].default
    if shape.initializer_range not in (default, told.get("initializer_range", shape.initializer_range)):
        found["initializer_range"] = f"{shape.initializer_range} has no effect on weights that are there"
    return found | _windows(shape, told)


def _derived(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what follows from other fields where a configuration leaves it out, or has it elsewhere."""
    derived: dict[str, Any] = {}
    heads, width = told.get("num_attention_heads"), told.get("hidden_size")
    if told.get("model_type") in {"llama", "olmo3"} and isinstance(heads, int) and isinstance(width, int):
        derived |= {"num_key_value_heads": heads, "head_dim": width // max(1, heads)}
    rope = told.get("rope_parameters")
    if isinstance(rope, dict):  # transformers 5; of layers of several kinds, each kind has its own
        kind = rope.get("full_attention", rope)
        theta = kind.get("rope_theta") if isinstance(kind, dict) else None
        derived |= {} if theta is None else {"rope_theta": theta}
    return {key: value for key, value in derived.items() if key not in told}


def _windows(shape: ArchitectureSpec, told: Mapping[str, Any]) -> dict[str, str]:
    """Return in what the windows of the layers differ."""
    window, types = told.get("sliding_window"), told.get("layer_types")
    planned = shape.sliding_window
    if shape.family in NEVER_WINDOWED and not told.get("use_sliding_window"):
        window = None
    if shape.family not in FAMILIES or shape.family in NEVER_WINDOWED:
        is_other = planned not in (None, window)
    elif not isinstance(types, list):
        is_other = window is not None and planned != window
    else:
        planned = planned or shape.max_position_embeddings
        is_other = "sliding_attention" in types and planned != window
        if list(types) != shape.layer_types:
            full = [str(number) for number, kind in enumerate(types, start=1) if kind == "full_attention"]
            return {
                "full_attention_every": f"{shape.full_attention_every} in the recipe, in the weights layers "
                f"{', '.join(full) or '(none)'} have full attention"
            }
    return {"sliding_window": f"{planned} in the recipe, {window} in the weights"} if is_other else {}
