"""AdamW: its parameter groups, its update, optimizer states in host memory, and the learning rate schedule."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from ftkit.train.gpu_kernels import can_update, update_adamw
from ftkit.train.model.local_shard import local_tensor
from ftkit.train.private_apis.deepspeed import zero3_partition
from ftkit.train.private_apis.torch import add_to_all

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim.optimizer import ParamsT

    from ftkit.config.training import TrainingPlan

T = TypeVar("T", bound=torch.Tensor)

Group = dict[str, Any]
"""A parameter group of torch's optimizers."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of a parameter's states in torch's AdamW."""


def parameter_groups(model: nn.Module, training: TrainingPlan) -> list[Group]:
    """Return the trained parameters in groups: matrices with weight decay, vectors and scalars without.

    The parameters of a group are on the same mesh, as torch's fused update requires.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = []
    for is_matrix, weight_decay in ((True, training.weight_decay), (False, 0.0)):
        chosen = [parameter for parameter in trained if (_num_dimensions(parameter) >= 2) == is_matrix]  # noqa: PLR2004
        groups += [{"params": each, "weight_decay": weight_decay} for each in _by_mesh(chosen)]
    return groups


def _by_mesh(parameters: Iterable[T]) -> list[list[T]]:
    """Group parameters by the mesh that they are sharded over; unsharded ones are one group."""
    groups: dict[DeviceMesh | None, list[T]] = {}
    for each in parameters:
        groups.setdefault(each.device_mesh if isinstance(each, DTensor) else None, []).append(each)
    return list(groups.values())


def _num_dimensions(parameter: torch.Tensor) -> int:
    partition = zero3_partition(parameter)
    return len(parameter.shape if partition is None else partition.shape)


class _Tensors(NamedTuple):
    """This rank's shards of a parameter, of its gradient and of its moments, and its number of steps."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    average: torch.Tensor
    square: torch.Tensor
    num_steps: torch.Tensor


class FusedAdamW(torch.optim.AdamW):
    """AdamW in one kernel for each large parameter on a GPU, and in torch's fused kernel for the others.

    Attributes:
        found_inf: fp32 scalar on the device; a step is skipped unless it is 0, as with `torch.amp.GradScaler`.
        grad_scale: fp32 scalar on the device, which gradients are divided by.
    """

    found_inf: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None

    def __init__(self, params: ParamsT, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, lr=lr, betas=betas, fused=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # no closure is ever given
        """Update the parameters that have a gradient."""
        del closure
        for group in self.param_groups:
            self._update([parameter for parameter in group["params"] if parameter.grad is not None], group)

    def _update(self, parameters: list[torch.Tensor], group: Group) -> None:
        large: list[_Tensors] = []
        small: list[_Tensors] = []
        for parameter in parameters:
            tensors = self._tensors(parameter)
            (large if can_update(tensors.parameter) else small).append(tensors)
        self._update_each(large, group)
        self._update_together(small, group)

    def _tensors(self, parameter: torch.Tensor) -> _Tensors:
        state = self.state[parameter]
        if not state:  # as torch does in the first step
            state["step"] = torch.zeros((), device=parameter.device)
            state |= {name: torch.zeros_like(parameter) for name in _MOMENTS}
        average, square = (state[name] for name in _MOMENTS)
        tensors = _Tensors(parameter, cast("torch.Tensor", parameter.grad), average, square, state["step"])
        return _Tensors(*map(local_tensor, tensors)) if isinstance(parameter, DTensor) else tensors

    def _update_each(self, updates: list[_Tensors], group: Group) -> None:
        if not updates:
            return
        device = updates[0].parameter.device
        is_skipped = torch.zeros((), device=device) if self.found_inf is None else self.found_inf
        divisor = torch.ones((), device=device) if self.grad_scale is None else self.grad_scale
        add_to_all([each.num_steps for each in updates], 1 - is_skipped)
        for each in updates:
            update_adamw(
                each.parameter, each.gradient.contiguous(), (each.average, each.square), each.num_steps,
                group=group, divisor=divisor, is_skipped=is_skipped,
            )  # fmt: skip

    def _update_together(self, updates: list[_Tensors], group: Group) -> None:
        if not updates:
            return
        parameters, gradients, averages, squares, num_steps = map(list, zip(*updates, strict=True))
        beta1, beta2 = group["betas"]
        constants = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize", "fused")}
        adamw(
            parameters, gradients, averages, squares, [], num_steps,
            beta1=beta1, beta2=beta2, grad_scale=self.grad_scale, found_inf=self.found_inf, **constants,
        )  # fmt: skip


class HostStateAdamW(FusedAdamW):
    """AdamW with its moments in host memory: those of a parameter are on the device only during its update."""

    def _update(self, parameters: list[torch.Tensor], group: Group) -> None:
        for parameter in parameters:
            self._move_moments(parameter, parameter.device)
            super()._update([parameter], group)
            self._move_moments(parameter, torch.device("cpu"))

    def to_host(self) -> None:
        """Move all moments to host memory: loading a checkpoint leaves them on the device."""
        for parameter in self.state:
            self._move_moments(parameter, torch.device("cpu"))

    def _move_moments(self, parameter: torch.Tensor, device: torch.device) -> None:
        state = self.state[parameter]
        for name in _MOMENTS:
            if name in state:
                state[name] = state[name].to(device)  # host sync: pageable memory, so that nothing reads it early


def learning_rate_at(step: int, num_steps: int, training: TrainingPlan) -> float:
    """Return the learning rate of a step.

    It rises linearly over the first `warmup_ratio` of all steps, to `learning_rate` at the last of these. Then it stays
    constant, or decays to `min_learning_rate_ratio` of that, linearly or along a cosine (Loshchilov & Hutter 2017,
    eq. 5). Steps are counted from 0.
    """
    warmup = round(training.warmup_ratio * num_steps)
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    low = training.min_learning_rate_ratio
    match training.schedule:
        case "constant":
            factor = 1.0
        case "linear":
            factor = 1 - (1 - low) * progress
        case "cosine":
            factor = low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2
    return training.learning_rate * factor
