"""Create an engine by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.engine import DEFAULT_SHARDING, ShardingOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ftkit.config.training import EngineName, TrainingPlan
    from ftkit.train.engine import Engine, InitWeights
    from ftkit.train.world import World


def make_engine(
    name: EngineName,
    hf_model: PreTrainedModel,
    training: TrainingPlan,
    world: World,
    init_weights: InitWeights,
    sharding: ShardingOptions = DEFAULT_SHARDING,
) -> Engine:
    """Shard a transformers model, allocate and initialize its parameters, and return its engine.

    Args:
        name: the engine's name.
        hf_model: the model, prepared for its method; its parameters may be on the meta device.
        training: the resolved training settings.
        world: the processes to shard it over.
        init_weights: initializes or loads the sharded parameters.
        sharding: when fsdp2 reshards and reduces; zero3 ignores it.

    Raises:
        PrerequisiteError: the engine's package is not installed.
        TrainingError: this version of torch does not support it.
    """
    if name == "zero3":
        from ftkit.train.distributed.zero3 import Zero3Engine  # noqa: PLC0415 - DeepSpeed is an extra

        return Zero3Engine(hf_model, training, world, init_weights)
    return Fsdp2Engine(hf_model, training, world, init_weights, sharding)
