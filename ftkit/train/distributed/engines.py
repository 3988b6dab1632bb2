"""The one place that knows the engines by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit.train.distributed.fsdp2 import Fsdp2Engine

if TYPE_CHECKING:
    from torch import nn

    from ftkit.config.training import EngineName, TrainingPlan
    from ftkit.train.engine import Engine, InitWeights
    from ftkit.train.world import World


def make_engine(
    name: EngineName,
    model: nn.Module,
    training: TrainingPlan,
    world: World,
    fill: InitWeights,
    *,
    keeps_weights: bool = False,
) -> Engine:
    """Shard a model, give its parameters memory and values, and return what trains it.

    `keeps_weights`: layers keep what they gathered for the forward pass until the backward pass; with fsdp2 alone.

    Raises:
        PrerequisiteError: the engine's package is not installed.
    """
    if name == "zero3":
        from ftkit.train.distributed.zero3 import Zero3Engine  # noqa: PLC0415 - DeepSpeed is an extra

        return Zero3Engine(model, training, world, fill)
    return Fsdp2Engine(model, training, world, fill, keeps_weights=keeps_weights)
