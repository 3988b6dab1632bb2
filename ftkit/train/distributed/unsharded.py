"""Adapters on one process: nothing is divided, so nothing has to be gathered.

An engine that gathered a few hundred small tensors would keep the host busier than the GPU. Trained weights stay in
fp32, and are cast where they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

    from ftkit.config.training import TrainingPlan
    from ftkit.train.world import World


def is_unsharded(training: TrainingPlan, world: World) -> bool:
    """Tell whether the model stays as it is. Parameters that wait in main memory have to be brought, as shards are."""
    return world.size == 1 and training.adapters is not None and training.offload != "all"


def cast_where_used(model: nn.Module, precision: torch.dtype, device: torch.device) -> None:
    """Let the model's methods compute in `precision`, whatever that of its weights is."""
    module: Any
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False  # peft would compute in the adapters' precision
    for name in ("forward", "summed_loss", "packed_hidden_states"):
        method = torch.autocast(device.type, precision)(getattr(model, name))
        object.__setattr__(model, name, method)
