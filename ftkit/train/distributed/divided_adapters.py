"""Adapters under tensor parallelism: of a colwise linear layer, `lora_B` is divided; of a rowwise one, `lora_A`.

The other matrix is unsharded on each rank, as in Megatron, and its gradients are summed over the ranks like those of
norms. Adapters exchange no activations of their own: their outputs join the base layer's before these are summed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from ftkit.config.training import LoraSpec


class DividedAdapter(nn.Module, ABC):
    """A frozen linear layer with its adapter, divided among ranks; parameters have peft's names.

    All ranks of the mesh must have the same seed. Dropout is then that of an undivided layer: ranks draw equal masks
    for inputs that all of them have; of divided inputs, each draws the mask of all features, and uses its part.
    """

    def __init__(self, adapted: nn.Module, lora: LoraSpec, mesh: DeviceMesh) -> None:
        """Divide peft's layer; its parameters may be on the meta device."""
        super().__init__()
        self._lora, self._mesh = lora, mesh
        self.base_layer = cast("nn.Linear", adapted.base_layer)
        self.lora_A, self.lora_B = (cast("nn.ModuleDict", part) for part in (adapted.lora_A, adapted.lora_B))
        self.lora_magnitude_vector = cast("nn.ModuleDict", adapted.lora_magnitude_vector)  # empty without DoRA

    def _divide(self, base: Placement, down: Placement, up: Placement, outputs: Placement) -> None:
        """Make the parameters DTensors; biases and magnitudes, one for each output, are divided as `outputs`."""
        _distribute(self.base_layer, self._mesh, lambda weight: base if weight.ndim > 1 else outputs)
        _distribute(self.lora_A, self._mesh, lambda _: down)
        _distribute(self.lora_B, self._mesh, lambda _: up)
        _distribute(self.lora_magnitude_vector, self._mesh, lambda _: outputs)

    def _product(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the outputs, or its summands of them, without the bias.

        As peft computes it: the base layer's inputs are not dropped, except those that DoRA scales.
        """
        dropped = self._drop(inputs, self._lora.dropout) if self.training and self._lora.dropout else inputs
        base, down, up = (_local(_only(part)) for part in (self.base_layer, self.lora_A, self.lora_B))
        product = functional.linear(inputs, base)
        adapted = self._lora.scaling * functional.linear(functional.linear(dropped, down), up)
        if not self._lora.use_dora:
            return product + adapted
        scales = (_local(_only(self.lora_magnitude_vector)) / self._norms(base, down, up)).to(product.dtype)
        scaled = product if dropped is inputs else functional.linear(dropped, base)
        return product + (scales - 1) * scaled + scales * adapted

    @torch.no_grad()
    def _norms(self, base: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return the norms of the rows of the merged weight, in fp32; DoRA takes them for constants."""
        with torch.autocast(base.device.type, enabled=False):
            squares = torch.addmm(base.float(), up, down, alpha=self._lora.scaling).square().sum(dim=1)
        return self._sum(squares).sqrt()

    @abstractmethod
    def _drop(self, inputs: torch.Tensor, probability: float) -> torch.Tensor:
        """Return this rank's inputs with dropout."""

    @abstractmethod
    def _sum(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the sums over whole rows of the weight, from those over this rank's part of each."""


class ColwiseAdapter(DividedAdapter):
    """Inputs are DTensors of all tokens, whole on each rank; outputs are local tensors, of a rank's features."""

    def __init__(self, adapted: nn.Module, lora: LoraSpec, mesh: DeviceMesh) -> None:
        super().__init__(adapted, lora, mesh)
        self._divide(base=Shard(0), down=Replicate(), up=Shard(0), outputs=Shard(0))

    def forward(self, inputs: DTensor) -> torch.Tensor:
        """Return this rank's features, [B, T, outputs / ranks], for inputs [B, T, inputs]."""
        product = self._product(inputs.to_local(grad_placements=[Partial()]))
        return product if self.base_layer.bias is None else product + _local(self.base_layer.bias)

    def _drop(self, inputs: torch.Tensor, probability: float) -> torch.Tensor:
        return functional.dropout(inputs, probability)

    def _sum(self, squares: torch.Tensor) -> torch.Tensor:
        return squares


class RowwiseAdapter(DividedAdapter):
    """Inputs are local tensors, of a rank's features; outputs too, of a rank's tokens."""

    def __init__(self, adapted: nn.Module, lora: LoraSpec, mesh: DeviceMesh) -> None:
        super().__init__(adapted, lora, mesh)
        self._divide(base=Shard(1), down=Shard(1), up=Replicate(), outputs=Replicate())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens, [B, T / ranks, outputs], for inputs [B, T, inputs / ranks]."""
        summed = DTensor.from_local(self._product(inputs), self._mesh, [Partial()], run_check=False)
        outputs = summed.redistribute(placements=[Shard(1)]).to_local()
        return outputs if self.base_layer.bias is None else outputs + _local(self.base_layer.bias)

    def _drop(self, inputs: torch.Tensor, probability: float) -> torch.Tensor:
        *tokens, features = inputs.shape
        mask = torch.empty(*tokens, self._mesh.size() * features, dtype=torch.bool, device=inputs.device)
        kept = mask.bernoulli_(1 - probability).narrow(-1, self._mesh.get_local_rank() * features, features)
        return inputs * kept.to(inputs.dtype) / (1 - probability)

    def _sum(self, squares: torch.Tensor) -> torch.Tensor:
        summed = DTensor.from_local(squares, self._mesh, [Partial()], run_check=False)
        return summed.redistribute(placements=[Replicate()]).to_local()


def _distribute(owner: nn.Module, mesh: DeviceMesh, placement_of: Callable[[nn.Parameter], Placement]) -> None:
    for module in owner.modules():
        for name, parameter in module.named_parameters(recurse=False):
            divided = distribute_tensor(parameter, mesh, [placement_of(parameter)])
            module.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))


def _only(owner: nn.Module) -> nn.Parameter:
    """Return the first parameter of a module, its weight."""
    return next(owner.parameters())


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's part on this rank; the gradient of one that is whole there has to be summed."""
    divided = cast("DTensor", parameter)
    is_whole = divided.placements[0].is_replicate()
    return divided.to_local(grad_placements=[Partial()] if is_whole else None)
