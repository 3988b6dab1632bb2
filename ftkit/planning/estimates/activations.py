"""What a decoder layer saves between forward and backward: how many numbers a token, by kind of tensor.

Read off the real layers: the tensors that autograd saves, with the layer compiled (torch.compile recomputes the
element-wise work between matrix products) and eager. The multiples are in `ftkit.families`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit.families import SavedTensors, family_of
from ftkit.planning.estimates.parameters import count_model

if TYPE_CHECKING:
    from ftkit.config.model import ArchitectureSpec


def layer_bytes(shape: ArchitectureSpec, width: int, *, compiled: bool, has_adapters: bool = False) -> int:
    """Return the bytes that a layer saves of a token, in a compute precision of `width` bytes."""
    savings = family_of(shape.family).savings
    size = width * _numbers(savings.compiled if compiled else savings.eager, shape)
    if compiled and has_adapters and savings.compiled_adapters is not None:
        size += width * _numbers(savings.compiled_adapters, shape)
    if not compiled:
        size += 4 * _numbers(savings.eager_fp32, shape)
    return size


def selective_numbers(shape: ArchitectureSpec) -> int:
    """Return how many numbers a layer saves of a token with selective checkpointing.

    They are its input and the outputs of its products and of its attention; of those into the residual stream
    only where a norm follows them, and otherwise the stream between attention and feed-forward.
    """
    return _numbers(SavedTensors(3 if family_of(shape.family).savings.norms_follow else 2, 2, 2, 2), shape)


def _numbers(saved: SavedTensors, shape: ArchitectureSpec) -> int:
    counts = count_model(shape)
    # A token is copied for each of its experts, whose outputs are weighted and summed up.
    hidden = saved.hidden + 3 * counts.experts_per_token * (saved.intermediate > 0)
    return (
        hidden * shape.hidden_size
        + saved.queries * shape.num_attention_heads * shape.head_dim
        + saved.keys * shape.num_key_value_heads * shape.head_dim
        + saved.intermediate * counts.feed_forward
    )
