"""Which engine trains a model, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from ftkit.gpus import GPUS
from ftkit.memory import predict_memory
from ftkit.specs.training import EngineName, Method

if TYPE_CHECKING:
    from ftkit.specs.cluster import GpuModel
    from ftkit.specs.recipe import RecipeSpec

_ENGINES: tuple[EngineName, ...] = get_args(EngineName)
_SHARDED: dict[Method, str] = {
    "full": "weights, gradients and optimizer states",
    "lora": "frozen weights and adapters",
    "qlora": "4-bit weights and adapters",
}


@dataclass(frozen=True)
class EnginePlan:
    """How the model is spread over the processes, and why so."""

    name: EngineName
    reason: str


def choose_engine(recipe: RecipeSpec, world_size: int, gpu: GpuModel | None) -> EnginePlan:
    """Return the engine that the recipe asks for; with `auto`, FSDP2 unless only ZeRO-3 fits the GPU."""
    wanted, only = recipe.training.engine, recipe.training.only_with_fsdp2
    if wanted != "auto":
        return EnginePlan(wanted, "the recipe asks for it")
    if world_size == 1:
        return EnginePlan("fsdp2", "one process: a single shard")
    if only:
        return EnginePlan("fsdp2", f"the only one for the recipe's {' and '.join(only)}")
    needed = {
        name: predict_memory(recipe.model.architecture, recipe.training, world_size, name).total for name in _ENGINES
    }
    if gpu is not None and needed["zero3"] <= GPUS[gpu].usable_gib < needed["fsdp2"]:
        return EnginePlan(
            "zero3",
            f"{world_size} processes: {needed['zero3']:.0f} GiB a {gpu} with zero3, which it has "
            f"({GPUS[gpu].memory_gib:g} GiB); {needed['fsdp2']:.0f} GiB with fsdp2",
        )
    return EnginePlan("fsdp2", f"{world_size} processes: {_SHARDED[recipe.training.method]} in {world_size} shards")
