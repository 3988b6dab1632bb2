"""AdamW with 8-bit states: one byte each, and a scale for every 256 of them (Dettmers et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim.adamw import adamw

from ftkit.errors import TrainingError
from ftkit.train.model.local_shard import local_shard, num_shards
from ftkit.train.private_apis.bitsandbytes import import_bitsandbytes

if TYPE_CHECKING:
    from collections.abc import Mapping

BLOCK_SIZE = 256
"""Number of states that share a scale: the only block size of bitsandbytes' optimizers."""
MIN_8BIT_SIZE = 4096
"""Parameters with fewer elements have fp32 states, as in bitsandbytes (`min_8bit_size`)."""
_STATES = {"exp_avg": True, "exp_avg_sq": False}
"""Names of the states in torch's AdamW, and whether they are signed."""
_BYTES, _ABSMAX = "_8bit", "_absmax"


@dataclass(frozen=True)
class _Layout:
    """Sharding of a parameter's states: each shard's flattened bytes are divided into blocks separately."""

    num_elements: int
    num_shards: int
    elements_per_shard: int
    """Elements of the first shard; the last ones may have fewer."""

    @classmethod
    def of(cls, parameter: torch.Tensor, num_shards: int) -> _Layout:
        """Return the layout of FSDP2's sharding by rows."""
        rows = parameter.shape[0] if parameter.ndim else 1
        return cls(parameter.numel(), num_shards, -(-rows // num_shards) * (parameter.numel() // max(1, rows)))

    @property
    def num_blocks(self) -> int:
        """Number of scales of the first shard; every shard allocates as many."""
        return -(-self.elements_per_shard // BLOCK_SIZE)

    def scale_of_each(self, absmax: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Return the scales of a range of elements of the whole parameter; `absmax` is [shards, blocks]."""
        size = self.elements_per_shard
        parts = [
            absmax[shard].repeat_interleave(BLOCK_SIZE)[max(begin - shard * size, 0) : min(end - shard * size, size)]
            for shard in range(begin // size, -(-end // size))
        ]
        return torch.cat(parts)


class AdamW8bit(torch.optim.Optimizer):
    """Updates each rank's shards in place; one kernel per parameter reads, updates and quantizes its states.

    Its `state_dict` has the bytes and scales: on the same number of ranks, training continues bit for bit. On another
    number of ranks the block boundaries move, and states in a block with several scales are rounded to the largest.

    Args:
        params: parameters or groups, as in torch.
        lr: the learning rate.
        betas: AdamW's decay rates.
        eps: added to the denominator, as in torch.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.found_inf: torch.Tensor | None = None
        """Scalar on the device, 1 to skip the next step, as in torch's fused optimizers."""
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
                if not self.state[parameter]:
                    self.state[parameter] = _zeros(parameter)
                if _is_large(parameter):
                    self._update(parameter, group)
            self._update_small([parameter for parameter in trained if not _is_large(parameter)], group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        values, gradient = _local(parameter), _local(cast("torch.Tensor", parameter.grad))
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

    def _update_small(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            [_local(parameter) for parameter in parameters],
            [_local(cast("torch.Tensor", parameter.grad)) for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"],
            eps=group["eps"], maximize=False,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the states as shards, without a copy, and scales as tensors [shards, blocks]."""
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


def allocate_saved_scales(states: Mapping[str, dict[str, Any]], sizes: Mapping[str, torch.Size]) -> None:
    """Allocate scales of the saved sizes, to load a checkpoint that has another number of shards.

    Args:
        states: states of each parameter by its name, as `state_dict` returns them; the checkpoint is read into them.
        sizes: shapes of the checkpoint's tensors, by names that begin with the parameter's.

    Raises:
        TrainingError: the states of the checkpoint were not stored in 8 bits.
    """
    for name, state in states.items():
        for key in [key for key in state if key.endswith(_ABSMAX)]:
            saved = sizes.get(f"{name}.{key}")
            if saved is None:
                raise TrainingError(
                    f"the checkpoint has no '{key}' of '{name}'",
                    meaning="an older ftkit wrote it, which stored the states of adamw8bit in fp32",
                    fix="resume with the ftkit that started the run, or start a new run from its export",
                )
            if saved != state[key].shape:
                state[key] = torch.empty(saved)


def _is_large(parameter: torch.Tensor) -> bool:
    """Return whether the states have 8 bits. The unsharded size decides, so the number of shards doesn't matter."""
    return parameter.numel() >= MIN_8BIT_SIZE


def _zeros(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    values = _local(parameter)
    state = {"step": torch.zeros(())}
    for name in _STATES:
        if _is_large(parameter):
            state[name + _BYTES] = torch.zeros_like(values, dtype=torch.uint8)
            state[name + _ABSMAX] = values.new_zeros(_layout(parameter).num_blocks)
        else:
            state[name] = torch.zeros_like(values)
    return state


def _as_shards(parameter: torch.Tensor, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    shards = {}
    for key, value in state.items():
        if key.endswith(_ABSMAX):
            layout = _layout(parameter)
            shape = torch.Size([layout.num_shards, layout.num_blocks])
            shards[key] = _sharded(value[None], parameter, shape, (layout.num_blocks, 1))
        else:
            is_step = key == "step"
            shards[key] = value if is_step else _sharded(value, parameter, parameter.shape, parameter.stride())
    return shards


def _sharded(values: torch.Tensor, parameter: torch.Tensor, shape: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return values
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=shape, stride=stride)


def _load_local(parameter: torch.Tensor, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's part of the states of a `state_dict`."""
    device = _local(parameter).device
    state = {key: _local(value).to(device) for key, value in given.items() if key != "step"}
    for name in _STATES if _is_large(parameter) else ():
        absmax, layout = state[name + _ABSMAX], _layout(parameter)
        if given[name + _ABSMAX].shape == (layout.num_shards, layout.num_blocks):
            state[name + _ABSMAX] = absmax.flatten()
        else:
            state |= _reblocked(parameter, name, state[name + _BYTES], absmax)
    return {"step": given["step"].cpu().clone()} | state


def _reblocked(
    parameter: torch.Tensor, name: str, stored: torch.Tensor, absmax: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return bytes and scales in the blocks of this rank's shard; `absmax` has the scales of all saved shards.

    A block with one scale does not change. A block with several takes the largest of them, so no state grows.
    """
    part, layout = local_shard(parameter), _layout(parameter)
    scales = stored.new_zeros(layout.num_blocks, dtype=torch.float32)
    if not stored.numel():
        return {name + _BYTES: stored, name + _ABSMAX: scales}
    saved = _Layout.of(parameter, absmax.shape[0])
    before = saved.scale_of_each(absmax, part.begin, part.end)
    padded = functional.pad(before, (0, -len(before) % BLOCK_SIZE)).view(-1, BLOCK_SIZE)
    blocks = padded.amax(dim=1)
    scales[: len(blocks)] = blocks
    after = blocks.clamp_min(torch.finfo(torch.float32).tiny).repeat_interleave(BLOCK_SIZE)[: len(before)]
    code = _codes(stored.device)[name]
    values = code.index_select(0, stored.flatten().int()) * (before / after)
    nearest = torch.bucketize(values, (code[1:] + code[:-1]) / 2, out_int32=True)
    return {name + _BYTES: nearest.to(torch.uint8).view_as(stored), name + _ABSMAX: scales}


def _layout(parameter: torch.Tensor) -> _Layout:
    return _Layout.of(parameter, num_shards(parameter))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@cache
def _codes(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the values that the bytes of each state encode, in ascending order."""
    return {name: _library().create_dynamic_map(signed=signed).to(device) for name, signed in _STATES.items()}


def _library() -> Any:
    return import_bitsandbytes("optimizer 'adamw8bit'")
