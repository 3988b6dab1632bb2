"""What a training method trains, keeps frozen and quantises, counted from the architecture alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftkit.config.model import ArchitectureSpec
    from ftkit.config.training import LoraSpec


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model as a method trains it: in all, adapters too; those trained; those kept in 4 bits."""

    total: int
    trained: int
    quantized: int = 0


def projections(shape: ArchitectureSpec) -> dict[str, tuple[int, int]]:
    """Return the linear projections of a decoder layer, each with its numbers of inputs and outputs."""
    hidden, wide = shape.hidden_size, shape.intermediate_size
    heads = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    return {
        "q_proj": (hidden, heads),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (heads, hidden),
        "gate_proj": (hidden, wide),
        "up_proj": (hidden, wide),
        "down_proj": (wide, hidden),
    }


def adapter_size(lora: LoraSpec, num_inputs: int, num_outputs: int) -> int:
    """Count the parameters of the adapter of one projection."""
    return lora.rank * (num_inputs + num_outputs) + (num_outputs if lora.use_dora else 0)
