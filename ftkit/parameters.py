"""How many parameters a model has, from the architecture alone.

Exact for the Hugging Face implementations of the four families, with which the tests compare; estimates for others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit.methods import ParameterCounts, count_adapter_parameters, count_quantised_parameters

if TYPE_CHECKING:
    from ftkit.specs.model import ArchitectureSpec
    from ftkit.specs.training import TrainingSpec


def layer_parameters(shape: ArchitectureSpec) -> int:
    """Count the parameters of one decoder layer."""
    hidden, heads = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    attention = hidden * heads + 2 * hidden * keys + heads * hidden
    feed_forward = 3 * hidden * shape.intermediate_size
    norms = {
        "llama": 2 * hidden,
        "qwen3": 2 * hidden + 2 * shape.head_dim,
        "olmo3": 2 * hidden + heads + keys,
        "gemma3_text": 4 * hidden + 2 * shape.head_dim,
    }.get(shape.family, 2 * hidden)
    return attention + feed_forward + norms


def embedding_parameters(shape: ArchitectureSpec) -> int:
    """Count the parameters outside the decoder layers: embedding, last norm, output projection."""
    tables = 1 if shape.tie_word_embeddings else 2
    return tables * shape.vocab_size * shape.hidden_size + shape.hidden_size


def count_parameters(shape: ArchitectureSpec) -> int:
    """Count all parameters."""
    return shape.num_hidden_layers * layer_parameters(shape) + embedding_parameters(shape)


def method_counts(shape: ArchitectureSpec, training: TrainingSpec) -> ParameterCounts:
    """Count the parameters of a model as a method trains it."""
    base = count_parameters(shape)
    if training.adapters is None:
        return ParameterCounts(total=base, trained=base)
    adapters = count_adapter_parameters(shape, training.adapters)
    return ParameterCounts(base + adapters, adapters, count_quantised_parameters(shape, training))
