"""Count the FLOPs of a token.

Attention is counted as causal, with its windows; recomputation is not counted. A matrix of m x n costs 2mn FLOPs per
token in the forward pass, as many again for the gradient of its input, and as many for its own gradient if it is
trained. A query that attends to k keys costs 4k FLOPs per dimension and head in the forward pass, and twice that in the
backward pass (Dao et al. 2022, appendix B).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftkit.models.adapters import count_active_adapter_parameters
from ftkit.models.parameters import count_model
from ftkit.models.spec import AttentionLayers

if TYPE_CHECKING:
    from ftkit.config.training import TrainingSpec
    from ftkit.models.spec import ArchitectureSpec


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one token, forward and backward: in matmuls, and in attention between queries and keys."""

    matrices: float
    attention: float

    @property
    def total(self) -> float:
        """FLOPs of both."""
        return self.matrices + self.attention


def attention_layers(shape: ArchitectureSpec) -> tuple[AttentionLayers, ...]:
    """Return the attention of all layers: the counted one, else the shape's."""
    if counted := count_model(shape).attention:
        return counted
    layers, width = shape.num_hidden_layers, shape.num_attention_heads * shape.head_dim
    full = layers // (1 if shape.sliding_window is None else shape.full_attention_every)
    return AttentionLayers(full, width), AttentionLayers(layers - full, width, is_windowed=True)


def mean_visible_keys(length: int, window: int | None) -> float:
    """Return the mean number of keys that a token of a document of `length` tokens attends to, itself included."""
    seen = min(length, window or length)
    return seen - seen * (seen - 1) / (2 * length)


def token_flops(
    shape: ArchitectureSpec,
    training: TrainingSpec,
    keys: float,
    keys_in_window: float,
    target_ratio: float = 1.0,
) -> TokenFlops:
    """Count the FLOPs of one token.

    Args:
        shape: shape of the model.
        training: the settings, which decide what is trained.
        keys: mean number of keys that a token attends to without a window, in its own document.
        keys_in_window: the same with the model's window.
        target_ratio: fraction of tokens in the loss; the others skip the output projection.
    """
    matrices = count_model(shape).active + target_ratio * shape.vocab_size * shape.hidden_size
    adapters = 0 if training.adapters is None else count_active_adapter_parameters(shape, training.adapters)
    passes = 6 if training.adapters is None else 4
    attention = 0.0
    for layers in attention_layers(shape):
        # The gated delta rule decays, corrects and reads a state of keys x values per head: 3 products forward.
        seen = 1.5 * layers.state if layers.state else keys_in_window if layers.is_windowed else keys
        attention += 12 * layers.count * layers.width * seen
    return TokenFlops(passes * matrices + 6 * adapters, attention)


def document_flops(shape: ArchitectureSpec, training: TrainingSpec, length: int) -> TokenFlops:
    """Count the FLOPs of one token in documents of `length` tokens, all of them in the loss."""
    return token_flops(
        shape, training, mean_visible_keys(length, None), mean_visible_keys(length, shape.sliding_window)
    )
