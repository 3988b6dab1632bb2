"""Count the sharded parameters of a model on one rank, the same way for every engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftkit.train.engine import ShardingStats
from ftkit.train.memory.activation_checkpointing import activation_checkpointing_of, is_offloaded
from ftkit.train.model.build import find_decoder_layers
from ftkit.train.model.expert_adapters import GroupedExperts
from ftkit.train.model.linears import QuantizedLinear

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


@dataclass(frozen=True)
class ParameterShard:
    """Elements of one parameter.

    Attributes:
        total: all of them, unsharded.
        local: those on this rank.
        allowed: the maximum on this rank.
    """

    total: int
    local: int
    allowed: int


def collect_sharding_stats(
    hf_model: nn.Module,
    shard_of: Callable[[nn.Parameter], ParameterShard],
    num_units: int,
    num_sharded_layers: int,
    *,
    is_unsharded: bool = False,
) -> ShardingStats:
    """Count the elements of a model; a quantized matrix counts as its weights."""
    layers = find_decoder_layers(hf_model)
    shards = {parameter: shard_of(parameter) for parameter in hf_model.parameters()}
    linears = [module for module in hf_model.modules() if isinstance(module, QuantizedLinear)]
    experts = [
        layout
        for module in hf_model.modules()
        if isinstance(module, GroupedExperts)
        for layout in module.layouts.values()
    ]
    quantized = sum(linear.num_weights for linear in linears) + sum(layout.num_weights for layout in experts)
    stored_for_quantized = sum(linear.layout.num_stored for linear in linears)
    stored_for_quantized += sum(layout.num_experts * layout.num_stored for layout in experts)
    return ShardingStats(
        num_layers=len(layers),
        num_units=num_units,
        num_sharded_layers=num_sharded_layers,
        checkpointed_layers=Counter(activation_checkpointing_of(layer) for layer in layers),
        total_elements=sum(shard.total for shard in shards.values()) - stored_for_quantized + quantized,
        local_elements=sum(shard.local for shard in shards.values()),
        max_local_elements=sum(shard.allowed for shard in shards.values()),
        trainable_elements=sum(shard.total for parameter, shard in shards.items() if parameter.requires_grad),
        quantized_elements=quantized,
        offloaded_layers=sum(is_offloaded(layer) for layer in layers),
        is_unsharded=is_unsharded,
    )
