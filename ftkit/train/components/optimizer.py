"""AdamW with states in 32 or 8 bits, on the device or in host memory; parameter groups; the learning rate schedule."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim.adamw import adamw

from ftkit.train.gpu_kernels import can_update, has_kernels, update_adamw, update_adamw8bit
from ftkit.train.model.local_shard import local_tensor
from ftkit.train.model.vision import trained_vision
from ftkit.train.private_apis.libraries import import_bitsandbytes, zero3_partition
from ftkit.train.private_apis.torch import add_to_all, cast_all

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim.optimizer import ParamsT
    from transformers import PreTrainedModel

    from ftkit.config.training import TrainingPlan

    Group = dict[str, Any]  # a parameter group of torch's optimizers
    States = dict[str, torch.Tensor]  # of one parameter

_MOMENTS = ("exp_avg", "exp_avg_sq")  # names of a parameter's states in torch's AdamW
_BIAS_OR_NORM = re.compile(r"bias|norm(\.weight)?$", re.IGNORECASE)
"""Names of parameters without weight decay, as in transformers' Trainer."""


def parameter_groups(model: PreTrainedModel, training: TrainingPlan) -> list[Group]:
    """Return the trained parameters, grouped by mesh as fused updates require.

    Only matrices have weight decay; biases and norms have none, although those of experts or heads are stacked.
    A group's learning rate is the schedule's times its `factor`.
    """
    groups: dict[tuple[float, float, DeviceMesh | None], list[nn.Parameter]] = {}
    trained, _ = trained_vision(model, training.vision)
    vision = {id(parameter) for parameter in trained.values()}
    own_factor = (training.vision_learning_rate or training.learning_rate) / training.learning_rate
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        partition = zero3_partition(parameter)
        is_matrix = len(parameter.shape if partition is None else partition.shape) >= 2  # noqa: PLR2004
        is_matrix &= not _BIAS_OR_NORM.search(name)
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        key = (training.weight_decay if is_matrix else 0.0, own_factor if id(parameter) in vision else 1.0, mesh)
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "factor": factor}
        for (decay, factor, _), parameters in groups.items()
    ] or [{"params": [], "factor": 1.0}]  # a teacher has none


def make_optimizer(model: PreTrainedModel, training: TrainingPlan) -> FusedAdamW:
    """Create the recipe's optimizer for engine fsdp2. Each step sets the learning rate."""
    kinds: dict[str, type[FusedAdamW]] = {"adamw": FusedAdamW, "adamw8bit": AdamW8bit}
    kind = HostStateAdamW if training.offload == "optimizer" else kinds[training.optimizer]
    return kind(parameter_groups(model, training), 0.0, training.betas)


class FusedAdamW(torch.optim.AdamW):
    """AdamW with one kernel per large parameter on a GPU, and torch's fused kernel for all others.

    As with `torch.amp.GradScaler`, a step is skipped unless `found_inf` is 0, and gradients are divided by
    `grad_scale`; both are fp32 scalars on the device. `gradients` has those of another dtype than their parameters',
    which torch does not allow in `grad`.
    """

    found_inf: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None

    def __init__(self, params: ParamsT, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, lr=lr, betas=betas, fused=True)
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # no closure is ever given
        del closure
        for group in self.param_groups:
            self._update([each for each in group["params"] if self._gradient(each) is not None], group)

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return self.gradients.get(parameter, parameter.grad)

    def _update(self, parameters: list[torch.Tensor], group: Group) -> None:
        updates = [self._tensors(parameter) for parameter in parameters]
        if large := [each for each in updates if can_update(each[0])]:
            is_skipped, divisor = self._skips(large[0][0].device)
            add_to_all([num_steps for *_, num_steps in large], 1 - is_skipped)
            for values, gradient, average, square, num_steps in large:
                update_adamw(
                    values, gradient.contiguous(), (average, square), num_steps,
                    group=group, divisor=divisor, is_skipped=is_skipped,
                )  # fmt: skip
        if small := [each for each in updates if not can_update(each[0])]:
            beta1, beta2 = group["betas"]
            constants = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize", "fused")}
            parameters, gradients, averages, squares, num_steps_of_each = map(list, zip(*small, strict=True))
            if self.gradients:
                gradients = cast_all(gradients, torch.float32)
            adamw(
                parameters, gradients, averages, squares, [], num_steps_of_each,
                beta1=beta1, beta2=beta2, grad_scale=self.grad_scale, found_inf=self.found_inf, **constants,
            )  # fmt: skip

    def _skips(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether the step is skipped, and the divisor of gradients, as fp32 scalars."""
        is_skipped = torch.zeros((), device=device) if self.found_inf is None else self.found_inf
        divisor = torch.ones((), device=device) if self.grad_scale is None else self.grad_scale
        return is_skipped, divisor

    def _tensors(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """Return this rank's shards of a parameter, its gradient and its moments, and its number of steps."""
        state = self.state[parameter]
        if not state:  # as torch does in the first step
            state["step"] = torch.zeros((), device=parameter.device)
            state |= {name: torch.zeros_like(parameter) for name in _MOMENTS}
        gradient = cast("torch.Tensor", self._gradient(parameter))
        return [
            local_tensor(each) for each in (parameter, gradient, *(state[name] for name in _MOMENTS), state["step"])
        ]


class HostStateAdamW(FusedAdamW):
    """AdamW with its moments in host memory; a parameter's moments are on the device only during its update."""

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
    """Return the learning rate of a step, counted from 0.

    It rises linearly over the first `warmup_ratio` of all steps. Then it stays constant, or decays to
    `min_learning_rate_ratio` of the peak, linearly or along a cosine (Loshchilov & Hutter 2017, eq. 5).
    """
    warmup = round(training.warmup_ratio * num_steps)
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    low = training.min_learning_rate_ratio
    factors = {
        "constant": 1.0,
        "linear": 1 - (1 - low) * progress,
        "cosine": low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2,
    }
    return training.learning_rate * factors[training.schedule]


# --- 8-bit states --------------------------------------------------------------------------------


BLOCK_SIZE = 256  # number of states that share a scale: the only block size of bitsandbytes' optimizers
MIN_8BIT_SIZE = 4096  # parameters with fewer elements have fp32 states, as in bitsandbytes (`min_8bit_size`)
MAX_COLUMN_PARTS = 16
"""Number of parts of a row with separate scales in checkpoints: as many ranks may divide a row (tensor parallelism)."""
_BYTES, _ABSMAX = "_8bit", "_absmax"


class AdamW8bit(FusedAdamW):
    """AdamW with 8-bit states: one byte each, and a scale for every 256 of them (Dettmers et al. 2021).

    One kernel per parameter updates a rank's shard in place: ours, or bitsandbytes' on CPUs. bitsandbytes' optimizers
    don't support shards.

    Each rank's flattened shard has its own blocks. `state_dict` has the bytes, and the scales of runs of each row, in a
    form that is the same for any sharding. Training continues bit for bit if the block boundaries stay: with the same
    sharding, or if each row on a rank is a multiple of 256. Otherwise, a block with several scales takes the largest,
    and is rounded.
    """

    def __init__(self, params: ParamsT, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, lr, betas)
        self._library = import_bitsandbytes("optimizer 'adamw8bit'")

    def _update(self, parameters: list[torch.Tensor], group: Group) -> None:
        super()._update([parameter for parameter in parameters if not _is_large(parameter)], group)
        large = list(filter(_is_large, parameters))
        if not large:
            return
        is_skipped, divisor = self._skips(local_tensor(large[0]).device)
        states = [self._state_of(parameter) for parameter in large]
        add_to_all([state["step"] for state in states], 1 - is_skipped)
        for parameter, state in zip(large, states, strict=True):
            values, gradient = local_tensor(parameter), local_tensor(cast("torch.Tensor", self._gradient(parameter)))
            if not values.numel():  # a rank's shard of a parameter with few rows may be empty
                continue
            average, square = (
                (state[name + _BYTES], state[name + _ABSMAX], _code(name, values.device)) for name in _MOMENTS
            )
            if has_kernels(values):
                update_adamw8bit(
                    values, gradient.contiguous(), average, square, state["step"],
                    group=group, divisor=divisor, is_skipped=is_skipped,
                )  # fmt: skip
            elif not is_skipped:  # host sync, if a GPU has no Triton
                gradient = gradient.to(values.dtype).div_(divisor)
                self._library.optimizer_update_8bit_blockwise(
                    "adam", gradient, values, average[0], square[0], *group["betas"], 0.0, 0.0,
                    group["eps"], int(state["step"]), group["lr"], average[2], square[2], average[1], square[1],
                    weight_decay=group["weight_decay"],
                )  # fmt: skip

    def _state_of(self, parameter: torch.Tensor) -> States:
        """Return the states of this rank's shard of a parameter, which are zero in the first step."""
        state: States = self.state[parameter]
        values = local_tensor(parameter)
        if not state:
            state["step"] = torch.zeros((), device=values.device)
            for name in _MOMENTS:
                state[name + _BYTES] = torch.zeros_like(values, dtype=torch.uint8)
                state[name + _ABSMAX] = values.new_zeros(-(-values.numel() // BLOCK_SIZE))
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return the states as shards: the bytes without a copy, and one scale per run of each row."""
        result = super().state_dict()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        result["state"] = {
            index: {key: _as_shard(key, value, parameters[index]) for key, value in state.items()}
            for index, state in result["state"].items()
        }
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            if index in state_dict["state"]:
                self.state[parameter] = _from_shards(state_dict["state"][index], parameter)


def _is_large(parameter: torch.Tensor) -> bool:
    """Return whether the states have 8 bits. The unsharded size decides, so the number of shards doesn't matter."""
    return parameter.numel() >= MIN_8BIT_SIZE


def _run_length(parameter: torch.Tensor) -> int:
    """Return the number of elements per scale in a checkpoint: it divides blocks, and each rank's part of a row."""
    width = parameter.shape[-1] if parameter.ndim > 1 else 1
    return math.gcd(BLOCK_SIZE, width // math.gcd(width, MAX_COLUMN_PARTS))


def _as_shard(key: str, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if key == "step" or isinstance(value, DTensor):
        return value
    shape, local = parameter.shape, local_tensor(parameter)
    if key.endswith(_ABSMAX):
        run = _run_length(parameter)
        value = value.repeat_interleave(BLOCK_SIZE // run)[: local.numel() // run]
        value = value.view(*local.shape[:-1], local.shape[-1] // run)
        shape = torch.Size([*shape[:-1], shape[-1] // run])
    if not isinstance(parameter, DTensor):
        return value
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=shape, stride=stride)


def _from_shards(given: States, parameter: torch.Tensor) -> States:
    """Return this rank's part of the states of a `state_dict`; a block takes the largest of its runs' scales."""
    device, run = local_tensor(parameter).device, _run_length(parameter)
    if not _is_large(parameter):
        return {key: value.to(device) for key, value in given.items()}
    state = {key: local_tensor(value).to(device) for key, value in given.items()}
    for name in _MOMENTS:
        runs, per_block = state[name + _ABSMAX].flatten(), BLOCK_SIZE // run
        scales = functional.pad(runs, (0, -len(runs) % per_block)).view(-1, per_block).amax(dim=1)
        after = scales.repeat_interleave(per_block)[: len(runs)]
        if not torch.equal(runs, after):
            code, stored = _code(name, device), state[name + _BYTES]
            ratios = (runs / after.clamp_min(torch.finfo(torch.float32).tiny)).repeat_interleave(run)
            values = code.index_select(0, stored.flatten().int()) * ratios
            nearest = torch.bucketize(values, (code[1:] + code[:-1]) / 2, out_int32=True)
            state[name + _BYTES] = nearest.to(torch.uint8).view_as(stored)
        state[name + _ABSMAX] = scales
    return state


@cache
def _code(name: str, device: torch.device) -> torch.Tensor:
    """Return the values that the bytes of a state encode, in ascending order; only the average is signed."""
    code: torch.Tensor = import_bitsandbytes("optimizer 'adamw8bit'").create_dynamic_map(signed=name == _MOMENTS[0])
    return code.to(device)
