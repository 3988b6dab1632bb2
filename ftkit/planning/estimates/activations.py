"""What a decoder layer keeps between forward and backward: how many numbers a token, by kind of tensor.

Read off the real layers: the tensors that autograd saves, with the layer compiled (torch.compile recomputes the
element-wise work between matrix products) and eager. Names: H is the width of the residual stream, Q of all query
heads, K of all key heads, I of the feed-forward layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftkit.planning.estimates.parameters import count_model

if TYPE_CHECKING:
    from ftkit.config.model import ArchitectureSpec


@dataclass(frozen=True)
class _Kept:
    """Multiples of H, Q, K and I."""

    hidden: int
    queries: int
    keys: int
    intermediate: int = 0

    def numbers(self, shape: ArchitectureSpec) -> int:
        counts = count_model(shape)
        # A token is copied for each of its experts, whose outputs are weighted and summed up.
        hidden = self.hidden + 3 * counts.experts_per_token * (self.intermediate > 0)
        return (
            hidden * shape.hidden_size
            + self.queries * shape.num_attention_heads * shape.head_dim
            + self.keys * shape.num_key_value_heads * shape.head_dim
            + self.intermediate * counts.feed_forward
        )


_PLAIN = "llama"
_COMPILED = {
    # Inputs of the projections (two of them normalised), queries, keys, values, the attention's output, and the
    # feed-forward's three wide tensors; a norm of queries and keys keeps those from before it, a norm of outputs these.
    "llama": _Kept(4, 2, 2, 3),
    "qwen3": _Kept(4, 3, 3, 3),
    "olmo3": _Kept(4, 3, 3, 3),
    "gemma3_text": _Kept(5, 3, 3, 3),
}
_COMPILED_WITH_ADAPTERS = {
    # A norm of queries keeps their two parts, the frozen product's and the adapter's, in place of the sum.
    "qwen3": _Kept(0, 1, 0),
    "olmo3": _Kept(0, 1, 0),
    "gemma3_text": _Kept(0, 1, 0),
}
_EAGER = {
    "llama": _Kept(4, 2, 2, 4),
    "qwen3": _Kept(4, 3, 3, 4),
    "olmo3": _Kept(2, 2, 2, 4),
    "gemma3_text": _Kept(2, 2, 2, 4),
}
_EAGER_FP32 = {
    # What norms keep of their inputs, in fp32.
    "llama": _Kept(2, 0, 0),
    "qwen3": _Kept(2, 1, 1),
    "olmo3": _Kept(4, 2, 2),
    "gemma3_text": _Kept(8, 2, 2),
}


def layer_bytes(shape: ArchitectureSpec, width: int, *, compiled: bool, has_adapters: bool = False) -> int:
    """Return the bytes that a layer keeps of a token, in a compute precision of `width` bytes."""
    kept = (_COMPILED if compiled else _EAGER).get(shape.family) or (_COMPILED if compiled else _EAGER)[_PLAIN]
    size = width * kept.numbers(shape)
    if compiled and has_adapters and shape.family in _COMPILED_WITH_ADAPTERS:
        size += width * _COMPILED_WITH_ADAPTERS[shape.family].numbers(shape)
    if not compiled:
        size += 4 * (_EAGER_FP32.get(shape.family) or _EAGER_FP32[_PLAIN]).numbers(shape)
    return size


def selective_numbers(shape: ArchitectureSpec) -> int:
    """Return how many numbers a layer keeps of a token with selective checkpointing.

    They are its input and the outputs of its products and of its attention; of those into the residual stream
    only where a norm follows them, and otherwise the stream between attention and feed-forward.
    """
    norms_follow = shape.family in {"olmo3", "gemma3_text"}
    return _Kept(3 if norms_follow else 2, 2, 2, 2).numbers(shape)
