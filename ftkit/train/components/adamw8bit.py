"""AdamW with 8-bit states: one byte each, and a scale for every 256 of them (Dettmers et al. 2021)."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim.adamw import adamw

from ftkit.errors import TrainingError
from ftkit.train.model.local_shard import local_shard, local_tensor
from ftkit.train.private_apis.libraries import import_bitsandbytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim.optimizer import ParamsT

    from ftkit.train.components.optimizer import Group

BLOCK_SIZE = 256
"""Number of states that share a scale: the only block size of bitsandbytes' optimizers."""
MIN_8BIT_SIZE = 4096
"""Parameters with fewer elements have fp32 states, as in bitsandbytes (`min_8bit_size`)."""
_STATES = {"exp_avg": True, "exp_avg_sq": False}
"""Names of the states in torch's AdamW, and whether they are signed."""
_BYTES, _ABSMAX = "_8bit", "_absmax"


class AdamW8bit(torch.optim.Optimizer):
    """Updates each rank's shards in place; one kernel per parameter reads, updates and quantizes its states.

    Each rank's flattened shard has its own blocks. `state_dict` has the bytes and the scales of runs of each row, for
    any sharding: training continues bit for bit if the block boundaries stay, as they do with the same sharding, or if
    each row on a rank is a multiple of 256. Otherwise, a block with several scales takes the largest, and is rounded.
    """

    def __init__(self, params: ParamsT, lr: float, betas: tuple[float, float], eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        # As in torch's fused optimizers, scalars on the device: 1 to skip the next step, and a divisor of gradients.
        self.found_inf: torch.Tensor | None = None
        self.grad_scale: torch.Tensor | None = None
        _library()  # raises before step 1 if the package is missing

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # no closure is ever given
        """Update the parameters one by one; the small ones together."""
        del closure
        if self.found_inf is not None and self.found_inf:  # host sync: its kernel always updates
            return
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in trained:
                if self.grad_scale is not None:
                    cast("torch.Tensor", parameter.grad).div_(self.grad_scale)
                if not self.state[parameter]:
                    self.state[parameter] = _zeros(parameter)
                if _is_large(parameter):
                    self._update(parameter, group)
            self._update_small([parameter for parameter in trained if not _is_large(parameter)], group)

    def _update(self, parameter: torch.Tensor, group: Group) -> None:
        values, gradient = local_tensor(parameter), local_tensor(cast("torch.Tensor", parameter.grad))
        state = self.state[parameter]
        state["step"] += 1
        if not values.numel():  # of a parameter with few rows, a rank's shard may be empty
            return
        (beta1, beta2), codes, blocks = group["betas"], _codes(values.device), -(-values.numel() // BLOCK_SIZE)
        _library().optimizer_update_8bit_blockwise(
            "adam", gradient, values, state["exp_avg" + _BYTES], state["exp_avg_sq" + _BYTES], beta1, beta2, 0.0, 0.0,
            group["eps"], int(state["step"]), group["lr"], codes["exp_avg"], codes["exp_avg_sq"],
            state["exp_avg" + _ABSMAX][:blocks], state["exp_avg_sq" + _ABSMAX][:blocks],
            weight_decay=group["weight_decay"],
        )  # fmt: skip

    def _update_small(self, parameters: list[torch.Tensor], group: Group) -> None:
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            [local_tensor(parameter) for parameter in parameters],
            [local_tensor(cast("torch.Tensor", parameter.grad)) for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"],
            eps=group["eps"], maximize=False,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the states as shards, the bytes without a copy; scales are as many per row as it has runs."""
        result = super().state_dict()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        result["state"] = {index: _as_shards(parameters[index], state) for index, state in result["state"].items()}
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, on the same or another number of shards (see `allocate_saved_scales`)."""
        super().load_state_dict(state_dict | {"state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            given = state_dict["state"].get(index)
            if given is not None:
                self.state[parameter] = _load_local(parameter, given)


def allocate_saved_scales(states: Mapping[str, dict[str, torch.Tensor]], sizes: Mapping[str, torch.Size]) -> None:
    """Allocate scales of the saved sizes, to load a checkpoint that has another number of shards.

    `states` are those of each parameter by its name, as `state_dict` returns them; the checkpoint is read into them.
    `sizes` are shapes of the checkpoint's tensors, by names that begin with the parameter's.

    Raises:
        TrainingError: the states of the checkpoint were not stored in 8 bits.
    """
    for name, state in states.items():
        for key in [key for key in state if key.endswith(_ABSMAX)]:
            saved = sizes.get(f"{name}.{key}")
            if saved is None:
                raise TrainingError(
                    f"the checkpoint has no '{key}' of '{name}'",
                    meaning="another version of ftkit wrote it, or the recipe's optimizer was changed",
                    fix="resume with the ftkit and the recipe of the run, or start a new run from its export",
                )
            if saved != state[key].shape:
                state[key] = torch.empty(saved)


def _is_large(parameter: torch.Tensor) -> bool:
    """Return whether the states have 8 bits. The unsharded size decides, so the number of shards doesn't matter."""
    return parameter.numel() >= MIN_8BIT_SIZE


def _zeros(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    values = local_tensor(parameter)
    state = {"step": torch.zeros(())}
    for name in _STATES:
        if _is_large(parameter):
            state[name + _BYTES] = torch.zeros_like(values, dtype=torch.uint8)
            state[name + _ABSMAX] = values.new_zeros(-(-values.numel() // BLOCK_SIZE))
        else:
            state[name] = torch.zeros_like(values)
    return state


def _row_width(shape: torch.Size) -> int:
    """Return the elements of a row: of the last dimension; a vector has rows of one."""
    return shape[-1] if len(shape) > 1 else 1


def _run_length(parameter: torch.Tensor) -> int:
    """Return how many neighbors have one scale in a checkpoint: runs divide blocks, and each rank's part of a row."""
    return math.gcd(BLOCK_SIZE, _row_width(local_tensor(parameter).shape))


def _in_runs(shape: torch.Size, run_length: int) -> torch.Size:
    """Return the shape of a tensor with one element for each run of one of this shape."""
    return torch.Size([*shape[:-1], shape[-1] // run_length])


def _as_shards(parameter: torch.Tensor, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    shards, local, run_length = {}, local_tensor(parameter), _run_length(parameter)
    for key, value in state.items():
        if key.endswith(_ABSMAX):
            runs = value.repeat_interleave(BLOCK_SIZE // run_length)[: local.numel() // run_length]
            values, shape = runs.view(_in_runs(local.shape, run_length)), _in_runs(parameter.shape, run_length)
            shards[key] = _sharded(values, parameter, shape)
        else:
            shards[key] = value if key == "step" else _sharded(value, parameter, parameter.shape)
    return shards


def _sharded(values: torch.Tensor, parameter: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return values
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=shape, stride=stride)


def _load_local(parameter: torch.Tensor, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's part of the states of a `state_dict`."""
    device = local_tensor(parameter).device
    state = {key: local_tensor(value).to(device) for key, value in given.items() if key != "step"}
    for name in _STATES if _is_large(parameter) else ():
        state |= _in_blocks(parameter, name, state[name + _BYTES], given[name + _ABSMAX])
    return {"step": given["step"].cpu().clone()} | state


def _in_blocks(
    parameter: torch.Tensor, name: str, stored: torch.Tensor, saved: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return bytes and scales in the blocks of this rank's shard.

    A block with one scale does not change. A block with several takes the largest of them, so no state grows. `saved`
    are scales as `state_dict` returns them; those of another sharding unsharded.
    """
    run_length = _run_length(parameter)
    if saved.shape == _in_runs(parameter.shape, run_length):
        runs = local_tensor(saved).to(stored.device).flatten()
    else:
        runs, run_length = _scale_of_each(parameter, saved).to(stored.device), 1
    per_block = BLOCK_SIZE // run_length
    scales = functional.pad(runs, (0, -len(runs) % per_block)).view(-1, per_block).amax(dim=1)
    after = scales.repeat_interleave(per_block)[: len(runs)]
    if not torch.equal(runs, after):
        code = _codes(stored.device)[name]
        ratios = (runs / after.clamp_min(torch.finfo(torch.float32).tiny)).repeat_interleave(run_length)
        values = code.index_select(0, stored.flatten().int()) * ratios
        nearest = torch.bucketize(values, (code[1:] + code[:-1]) / 2, out_int32=True)
        stored = nearest.to(torch.uint8).view_as(stored)
    return {name + _BYTES: stored, name + _ABSMAX: scales}


def _scale_of_each(parameter: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """Return the scale of each element of this rank's shard, from unsharded scales of another sharding."""
    shard, width = local_shard(parameter), _row_width(parameter.shape)
    columns = range(width) if shard.columns is None else shard.columns
    first, last = shard.begin // len(columns), shard.end // len(columns)
    scales = saved.view(-1, saved.shape[-1])[first:last].repeat_interleave(width // saved.shape[-1], dim=1)
    return scales[:, columns.start : columns.stop].flatten()


@cache
def _codes(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the values that the bytes of each state encode, in ascending order."""
    return {name: _library().create_dynamic_map(signed=signed).to(device) for name, signed in _STATES.items()}


def _library() -> Any:
    return import_bitsandbytes("optimizer 'adamw8bit'")
