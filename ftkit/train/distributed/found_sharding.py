"""Find how a model that ftkit did not build is sharded, from its modules and parameters."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ftkit.errors import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

Sharding = Literal["fsdp2", "fsdp1", "zero3", "ddp", "none"]
_MIN_UNITS = 3
"""Two decoder layers and the rest: with fewer, the model is all-gathered in one piece."""


@dataclass(frozen=True)
class FoundSharding:
    """How a model is sharded over the processes that torchrun started."""

    sharding: Sharding
    num_units: int  # modules whose parameters are sharded together
    num_parameters: int  # elements of all parameters, unsharded
    num_held: int  # elements of them in this process's memory
    world_size: int
    is_connected: bool  # whether torch.distributed is initialized

    def explain_missing(self, *, was_asked: bool, device: str) -> str:
        """Return a sentence about what is wrong; an empty string if nothing is.

        `was_asked` tells whether accelerate was configured to shard.
        """
        if self.world_size == 1:
            return ""
        if not self.is_connected:
            return (
                "the processes do not train together: torch.distributed is not initialized, so each of the "
                f"{self.world_size} trains a separate model. Use accelerate or the Trainer, or call "
                "torch.distributed.init_process_group()"
            )
        if self.sharding in {"ddp", "none"}:
            copies = "nothing wraps them"
            if self.sharding == "ddp":
                copies = "DistributedDataParallel averages their gradients"
            reason = ". To shard the model, give a recipe or --accelerate-config FILE"
            if was_asked and device == "cpu":
                reason = ". accelerate does not shard on CPUs; on GPUs this run is refused"
            elif was_asked:
                reason = ", although accelerate.json enables it: the script does not prepare its model with accelerate"
            return (
                f"FSDP is not on: each of the {self.world_size} processes holds all {self.num_parameters:,} parameters "
                f"({copies}){reason}"
            )
        if self.sharding != "zero3" and self.num_units < _MIN_UNITS:
            return (
                f"FSDP is on, but the model is {plural(self.num_units, 'unit')}: all {self.num_parameters:,} "
                "parameters are all-gathered in one piece. Check the wrap policy of accelerate's configuration"
            )
        return ""


def live_modules() -> list[nn.Module]:
    """Return every module of this process. Takes about a second where there are many objects."""
    # By type, not isinstance, which would make lazy objects of libraries import their modules.
    return [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]


def find_sharding(modules: Sequence[nn.Module], world_size: int) -> FoundSharding:
    """Determine how the parameters of modules are sharded; `modules` lists submodules too."""
    parameters = {id(each): each for module in modules for each in module.parameters(recurse=False)}.values()
    units = sum(isinstance(each, FSDPModule) for each in modules)
    flat_units = sum(isinstance(each, FullyShardedDataParallel) for each in modules)
    sharding: Sharding = "none"
    if units:
        sharding = "fsdp2"
    elif flat_units:
        sharding = "fsdp1"
    elif any(hasattr(each, "ds_tensor") for each in parameters):  # DeepSpeed's
        sharding = "zero3"
    elif any(isinstance(each, DistributedDataParallel) for each in modules):
        sharding = "ddp"
    total = sum(int(getattr(each, "ds_numel", each.numel())) for each in parameters)
    held = sum(_local_part(each).numel() for each in parameters)
    if sharding == "fsdp1":  # flat parameters are one shard each
        total = held * world_size
    return FoundSharding(sharding, units or flat_units, total, held, world_size, distributed.is_initialized())


def _local_part(parameter: torch.Tensor) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    partition: torch.Tensor = getattr(parameter, "ds_tensor", parameter)  # DeepSpeed's
    return partition
