"""Count the activations that decoder layers save for the backward pass.

They were measured on the real layers: the tensors that autograd saves, with the layer compiled (torch.compile
recomputes element-wise operations between matmuls) and eager. The multiples are in `ftkit.models.families`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit.models.families import SavedTensors, family_of
from ftkit.models.parameters import count_model

if TYPE_CHECKING:
    from ftkit.models.adapters import LoraSpec
    from ftkit.models.spec import ArchitectureSpec


def layer_bytes(shape: ArchitectureSpec, width: int, *, compiled: bool, adapters: LoraSpec | None = None) -> int:
    """Return the bytes that a layer saves per token for the backward pass; `width` is that of the compute dtype."""
    savings = family_of(shape.family).savings
    size = width * count_numbers(savings.compiled if compiled else savings.eager, shape)
    if not compiled:
        size += 4 * count_numbers(savings.eager_fp32, shape)
    return size + width * _expert_numbers(shape, adapters)


def selective_numbers(shape: ArchitectureSpec, adapters: LoraSpec | None = None) -> int:
    """Return the number of elements that a layer saves per token with selective checkpointing.

    These are its input and the outputs of its matmuls and of its attention. An output that is added to the residual
    stream is saved only if a norm follows it; otherwise the stream between attention and feed-forward is.
    """
    counts = count_model(shape)
    outputs = counts.experts_per_token * shape.hidden_size + _expert_ranks(shape, adapters)
    return outputs + count_numbers(
        SavedTensors(3 if family_of(shape.family).savings.norms_follow else 2, 2, 2, 2), shape
    )


def _expert_ranks(shape: ArchitectureSpec, adapters: LoraSpec | None) -> int:
    """Return the total rank of the adapters of a token's experts: the width of the products with `lora_A`."""
    counts = count_model(shape)
    ranks = sum(each.num_ranks(adapters.targets) for each in counts.expert_matrices) if adapters else 0
    return counts.experts_per_token * ranks * adapters.rank if adapters else 0


def _expert_numbers(shape: ArchitectureSpec, adapters: LoraSpec | None) -> int:
    """Return the elements that routed experts save per token, in addition to a dense layer of their total width.

    These are each expert's copy of the token, and its output, which is multiplied by the router's weight. Frozen
    experts don't save the inputs of their matmuls, because no weight gradient needs them, unless they have adapters;
    neither does a frozen router.
    """
    counts = count_model(shape)
    copies = counts.experts_per_token * shape.hidden_size
    if not copies or adapters is None:
        return 2 * copies
    adapted = {each.name: each.inputs for each in counts.expert_matrices if each.num_ranks(adapters.targets)}
    inputs = counts.experts_per_token * sum(adapted.values())
    return copies - shape.hidden_size - counts.feed_forward + inputs + _expert_ranks(shape, adapters)


def count_numbers(saved: SavedTensors, shape: ArchitectureSpec) -> int:
    """Return the elements per token of tensors of a layer."""
    return (
        saved.hidden * shape.hidden_size
        + saved.queries * shape.num_attention_heads * shape.head_dim
        + saved.keys * shape.num_key_value_heads * shape.head_dim
        + saved.intermediate * count_model(shape).feed_forward
    )
