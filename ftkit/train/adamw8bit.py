"""AdamW with states of 8 bits: a byte each, and a scale for every 256 of them (Dettmers et al. 2021)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import DTensor

from ftkit.train.quantise import import_bitsandbytes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BLOCK = 256
"""States that share a scale: bitsandbytes' optimizers know no other number."""
_STATES = {"exp_avg": True, "exp_avg_sq": False}
"""Names as AdamW has them, and whether there are negative ones."""
_SCALE = "_scale"


class AdamW8bit(torch.optim.Optimizer):
    """Updates each rank's shards where they lie; one kernel a parameter reads, updates and quantises its states.

    Its `state_dict` is that of AdamW: shards in fp32, in main memory, of which any number of ranks can take theirs.
    Reading one back rounds the states once more, as a step does.

    Args:
        params: as any optimizer takes them.
        lr: the learning rate.
        betas: AdamW's decay rates.
        host_mesh: the ranks' main memories, on which the shards of a state_dict lie.
        eps: AdamW's.
    """

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], host_mesh: DeviceMesh, eps: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._host_mesh = host_mesh
        _library()  # a missing package is noticed before step 1

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # no closure is ever given
        """Update parameter by parameter."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        values, gradient = _local(parameter), _local(cast("torch.Tensor", parameter.grad))
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for name in _STATES:
                state[name] = torch.zeros_like(values, dtype=torch.uint8)
                state[name + _SCALE] = values.new_zeros(-(-values.numel() // BLOCK))
        state["step"] += 1
        if not values.numel():  # of a short parameter a rank may have nothing
            return
        (beta1, beta2), codes = group["betas"], _codes(values.device)
        _library().optimizer_update_8bit_blockwise(
            "adam", gradient, values, state["exp_avg"], state["exp_avg_sq"], beta1, beta2, 0.0, 0.0, group["eps"],
            int(state["step"]), group["lr"], codes["exp_avg"], codes["exp_avg_sq"],
            state["exp_avg" + _SCALE], state["exp_avg_sq" + _SCALE], weight_decay=group["weight_decay"],
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return AdamW's states, a parameter's at a time dequantised and sent to main memory."""
        result = super().state_dict()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        result["state"] = {
            index: self._dequantised(parameters[index], state) for index, state in result["state"].items()
        }
        return result

    def _dequantised(self, parameter: torch.Tensor, state: dict[str, Any]) -> dict[str, torch.Tensor]:
        values = {name: _dequantised_state(state, name) for name in _STATES}
        if isinstance(parameter, DTensor):
            values = {name: self._sharded(value, parameter) for name, value in values.items()}
        return {"step": state["step"].clone()} | values

    def _sharded(self, values: torch.Tensor, parameter: DTensor) -> torch.Tensor:
        """Return values as the shard that they are. On the parameter's own mesh they would go back to its device."""
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(
            values, self._host_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take AdamW's states, a parameter's at a time sent to its device and quantised."""
        super().load_state_dict(state_dict | {"state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            given = state_dict["state"].get(index)
            if given is not None:
                self.state[parameter] = _quantised(given, _local(parameter).device)


def _quantised(state: dict[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    quantised = {"step": state["step"].cpu().clone()}
    for name in _STATES:
        _quantise_into(quantised, name, _local(state[name]).to(device))
    return quantised


def _quantise_into(state: dict[str, torch.Tensor], name: str, values: torch.Tensor) -> None:
    code = _codes(values.device)[name]
    if not values.numel():
        state[name], state[name + _SCALE] = values.to(torch.uint8), values.flatten()
        return
    quantised, how = _library().quantize_blockwise(values, code=code, blocksize=BLOCK)
    state[name], state[name + _SCALE] = quantised, how.absmax


def _dequantised_state(state: dict[str, Any], name: str) -> torch.Tensor:
    """Return a state in fp32 and main memory."""
    quantised = state[name]
    values: torch.Tensor = quantised.float()
    if quantised.numel():
        code = _codes(quantised.device)[name]
        values = _library().dequantize_blockwise(quantised, absmax=state[name + _SCALE], code=code, blocksize=BLOCK)
    return values.cpu()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@cache
def _codes(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the numbers that the bytes of each state stand for."""
    return {name: _library().create_dynamic_map(signed=signed).to(device) for name, signed in _STATES.items()}


def _library() -> Any:
    return import_bitsandbytes("optimizer 'adamw8bit'")
