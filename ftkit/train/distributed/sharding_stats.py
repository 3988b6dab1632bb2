"""What is true of a sharded model on one rank, gathered the same way for every engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftkit.train.distributed.checks import ShardingStats
from ftkit.train.memory.activation_checkpointing import activation_checkpointing_of
from ftkit.train.model.build import find_decoder_layers
from ftkit.train.model.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


@dataclass(frozen=True)
class ParameterShard:
    """Elements of a parameter: of the whole, those on this rank, and how many these may be at most."""

    whole: int
    local: int
    allowed: int


def collect_sharding_stats(
    model: nn.Module,
    held: Callable[[nn.Parameter], ParameterShard],
    num_units: int,
    num_sharded_layers: int,
    *,
    is_unsharded: bool = False,
) -> ShardingStats:
    """Count; a quantised matrix counts as the weights that it stands for."""
    layers = find_decoder_layers(model)
    parameters = {parameter: held(parameter) for parameter in model.parameters()}
    matrices = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    stored = sum(each.whole for each in parameters.values())
    packed = sum(module.layout.num_stored for module in matrices)
    quantised = sum(module.num_weights for module in matrices)
    return ShardingStats(
        num_layers=len(layers),
        num_units=num_units,
        num_sharded_layers=num_sharded_layers,
        checkpointed_layers=Counter(activation_checkpointing_of(layer) for layer in layers),
        total_elements=stored - packed + quantised,
        local_elements=sum(each.local for each in parameters.values()),
        max_local_elements=sum(each.allowed for each in parameters.values()),
        trainable_elements=sum(each.whole for parameter, each in parameters.items() if parameter.requires_grad),
        quantized_elements=quantised,
        is_unsharded=is_unsharded,
    )
