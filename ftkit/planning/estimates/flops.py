"""Floating-point operations of training, with causal attention and its windows counted; recomputation is not.

A matrix of m x n costs 2mn operations a token forward, as many again for the gradient of its input, and as many
for its own if it is trained. A query that sees k keys costs 4k operations a dimension and head forward, twice
that backward (Dao et al. 2022, appendix B).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftkit.config.model import AttentionLayers
from ftkit.planning.estimates.parameters import count_adapter_parameters, count_model

if TYPE_CHECKING:
    from ftkit.config.model import ArchitectureSpec
    from ftkit.config.training import TrainingSpec


@dataclass(frozen=True)
class TokenFlops:
    """Operations of one token, forward and backward: in matrix products, and between queries and keys."""

    matrices: float
    attention: float

    @property
    def total(self) -> float:
        """Both."""
        return self.matrices + self.attention


def attention_layers(shape: ArchitectureSpec) -> tuple[AttentionLayers, ...]:
    """Return the attention of all layers: as it was counted, or in plans of earlier versions as the shape says."""
    if counted := count_model(shape).attention:
        return counted
    layers, width = shape.num_hidden_layers, shape.num_attention_heads * shape.head_dim
    full = layers // (1 if shape.sliding_window is None else shape.full_attention_every)
    return AttentionLayers(full, width), AttentionLayers(layers - full, width, is_windowed=True)


def mean_visible_keys(length: int, window: int | None) -> float:
    """Return how many keys a token of a document of `length` tokens sees on average, itself among them."""
    seen = min(length, window or length)
    return seen - seen * (seen - 1) / (2 * length)


def token_flops(
    shape: ArchitectureSpec,
    training: TrainingSpec,
    keys: float,
    keys_in_window: float,
    target_ratio: float = 1.0,
) -> TokenFlops:
    """Count the operations of one token.

    Args:
        shape: the model.
        training: which of its weights are trained.
        keys: that a token sees on average without a window, in its own document.
        keys_in_window: the same with the model's window.
        target_ratio: part of the tokens whose next one counts; the output projection is left out for the others.
    """
    matrices = count_model(shape).active + target_ratio * shape.vocab_size * shape.hidden_size
    adapters = 0 if training.adapters is None else count_adapter_parameters(shape, training.adapters)
    passes = 6 if training.adapters is None else 4
    attention = 0.0
    for layers in attention_layers(shape):
        # The gated delta rule decays, corrects and reads a state of a head's keys by its values: 3 products forward.
        seen = 1.5 * layers.state if layers.state else keys_in_window if layers.is_windowed else keys
        attention += 12 * layers.count * layers.width * seen
    return TokenFlops(passes * matrices + 6 * adapters, attention)


def document_flops(shape: ArchitectureSpec, training: TrainingSpec, length: int) -> TokenFlops:
    """Count the operations of one token in documents of `length` tokens, each of them a target."""
    return token_flops(
        shape, training, mean_visible_keys(length, None), mean_visible_keys(length, shape.sliding_window)
    )
