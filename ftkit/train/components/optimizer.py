"""AdamW: its parameter groups, and optimizer states in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from ftkit.train.private_apis.deepspeed import zero3_partition

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from ftkit.config.training import TrainingPlan

T = TypeVar("T", bound=torch.Tensor)

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of a parameter's states in torch's AdamW."""


def parameter_groups(model: nn.Module, training: TrainingPlan) -> list[dict[str, Any]]:
    """Return the trained parameters in groups: matrices with weight decay, vectors and scalars without.

    The parameters of a group are on the same mesh, as torch's fused update requires.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = []
    for is_matrix, weight_decay in ((True, training.weight_decay), (False, 0.0)):
        chosen = [parameter for parameter in trained if (_num_dimensions(parameter) >= 2) == is_matrix]  # noqa: PLR2004
        groups += [{"params": each, "weight_decay": weight_decay} for each in by_mesh(chosen)]
    return groups


def by_mesh(parameters: Iterable[T]) -> list[list[T]]:
    """Group parameters or gradients by the mesh that they are sharded over; unsharded ones are one group."""
    groups: dict[DeviceMesh | None, list[T]] = {}
    for each in parameters:
        groups.setdefault(each.device_mesh if isinstance(each, DTensor) else None, []).append(each)
    return list(groups.values())


def _num_dimensions(parameter: torch.Tensor) -> int:
    partition = zero3_partition(parameter)
    return len(parameter.shape if partition is None else partition.shape)


class HostStateAdamW(torch.optim.AdamW):
    """AdamW with its moments in host memory: those of a parameter are on the device only during its update.

    Attributes:
        found_inf: fp32 scalar on the device; a step is skipped unless it is 0, as with `torch.amp.GradScaler`.
    """

    found_inf: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # no closure is ever given
        """Update one parameter after another, with torch's kernel."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:  # as torch does in the first step
            state["step"] = torch.zeros((), device=parameter.device)
            state |= {name: torch.zeros_like(parameter) for name in _MOMENTS}
        self._move_moments(parameter, parameter.device)
        beta1, beta2 = group["betas"]
        constants = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize", "fused")}
        first, second = ([state[name]] for name in _MOMENTS)
        adamw(
            [parameter], [gradient], first, second, [], [state["step"]], beta1=beta1, beta2=beta2,
            found_inf=self.found_inf, **constants,
        )  # fmt: skip
        self._move_moments(parameter, torch.device("cpu"))

    def to_host(self) -> None:
        """Move all moments to host memory: loading a checkpoint leaves them on the device."""
        for parameter in self.state:
            self._move_moments(parameter, torch.device("cpu"))

    def _move_moments(self, parameter: torch.Tensor, device: torch.device) -> None:
        state = self.state[parameter]
        for name in _MOMENTS:
            if name in state:
                state[name] = state[name].to(device)
