"""AdamW: its parameter groups, and optimizer states in main memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ftkit.train.private_apis import zero3_partition

if TYPE_CHECKING:
    from torch import nn

    from ftkit.config.training import TrainingPlan


def parameter_groups(model: nn.Module, training: TrainingPlan) -> list[dict[str, Any]]:
    """Return the trained parameters in two groups: matrices with weight decay, vectors and scalars without."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if _num_dimensions(parameter) >= 2]  # noqa: PLR2004
    vectors = [parameter for parameter in trained if _num_dimensions(parameter) < 2]  # noqa: PLR2004
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _num_dimensions(parameter: torch.Tensor) -> int:
    partition = zero3_partition(parameter)
    return len(parameter.shape if partition is None else partition.shape)


class HostStateAdamW(torch.optim.AdamW):
    """AdamW with its states in main memory: a parameter's are on the device during its update alone."""

    def step(self, closure: None = None) -> None:  # type: ignore[override] # no closure is ever given
        """Update one parameter after the other."""
        groups = self.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    self._move_states(parameter, parameter.device)
                    self.param_groups = [group | {"params": [parameter]}]
                    super().step(closure)
                    self._move_states(parameter, torch.device("cpu"))
        finally:
            self.param_groups = groups

    def to_host(self) -> None:
        """Move all states to main memory: loading a checkpoint leaves them on the device."""
        for parameter in self.state:
            self._move_states(parameter, torch.device("cpu"))

    def _move_states(self, parameter: torch.Tensor, device: torch.device) -> None:
        state = self.state.get(parameter, {})
        for name in ("exp_avg", "exp_avg_sq"):
            if name in state:
                state[name] = state[name].to(device)
