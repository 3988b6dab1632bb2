"""Undocumented names of DeepSpeed's ZeRO-3, in DeepSpeed 0.19.

If one goes: `deepspeed.utils.safe_get_local_*` reads weights, masters and states parameter by parameter.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ftkit.errors import PrerequisiteError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Zero3Partition:
    """This rank's partition of a parameter that DeepSpeed partitioned."""

    shape: torch.Size  # of the full parameter
    values: torch.Tensor  # flat view of the partition, padded on the last rank; writing to it changes the parameter
    is_persistent: bool  # every rank also has the full parameter, since it is small


def zero3_partition(parameter: torch.Tensor) -> Zero3Partition | None:
    """Return this rank's partition of a parameter; None if DeepSpeed did not partition it."""
    ds: Any = parameter
    if not hasattr(ds, "ds_tensor"):
        return None
    return Zero3Partition(ds.ds_shape, ds.ds_tensor, bool(getattr(ds, "ds_persist", False)))


class Zero3Optimizer:
    """The attributes of DeepSpeed's ZeRO-3 optimizer that have no public name."""

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer

    @property
    def masters(self) -> list[torch.Tensor]:
        """This rank's fp32 weights, one flat tensor per parameter group."""
        return list(self._optimizer.fp32_partitioned_groups_flat)

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The buffer of this rank's gradients, once there is one."""
        buffer = self._optimizer.grad_partitions_flat_buffer
        return [] if buffer is None else [buffer]

    @property
    def states(self) -> Mapping[torch.Tensor, dict[str, torch.Tensor]]:
        """The states of the wrapped torch optimizer, by master."""
        states: Mapping[torch.Tensor, dict[str, torch.Tensor]] = self._optimizer.optimizer.state
        return states

    @property
    def grad_norm(self) -> Any:
        """The global gradient norm of the last step; None if DeepSpeed skipped the step."""
        return None if self._optimizer.overflow else self._optimizer._global_grad_norm  # noqa: SLF001

    def set_step(self, learning_rate: float, max_norm: float) -> None:
        self._optimizer.clip_grad = max_norm
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def init_states(self, names: tuple[str, ...]) -> None:
        """Create the states that torch would create in the first step, so that a checkpoint can be loaded into them."""
        for master in self.masters:
            states = {name: torch.zeros_like(master) for name in names}
            self._optimizer.optimizer.state[master] = states | {"step": torch.zeros((), device=master.device)}

    def gather_persistent(self) -> None:
        """All-gather the persistent parameters again, after their partitions were written."""
        persistent = self._optimizer.persistent_parameters
        if persistent:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)


def forget_pending_gradients(model: nn.Module) -> None:
    """Make DeepSpeed expect no gradients for a forward pass without a backward pass.

    It counts the outputs of each module whose gradients are pending, and frees weights after the last.
    """
    for module in model.modules():
        if hasattr(module, "ds_grads_remaining"):
            module.ds_grads_remaining = 0  # type: ignore[assignment]


def import_deepspeed(device: torch.device) -> Any:
    """Return DeepSpeed, set up for a device, without compiling operators at the start.

    Without `__compatible_ops__`, it would compile shared memory for gloo for a minute where it trains on CPUs.
    """
    os.environ["DS_ACCELERATOR"] = device.type
    try:
        import deepspeed  # noqa: PLC0415 - it looks for the accelerator when it is imported
    except ImportError as error:
        raise PrerequisiteError(
            "engine 'zero3' needs DeepSpeed, which is not installed", fix="pip install 'ftkit[deepspeed]'"
        ) from error
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    logger.addFilter(lambda record: "leaf module configuration" not in record.getMessage())  # deliberately none
    # torch 2.13 warns at each of DeepSpeed's collectives, several times a step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    return deepspeed
