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

from ftkit.train.model.adapted_linear import AdaptedLinear, merged_squares

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from ftkit.train.model.adapted_linear import Draw, Dropout


class DividedAdapter(AdaptedLinear, ABC):
    """A frozen linear layer with its adapter, divided among ranks; parameters have peft's names.

    Dropout is that of the whole layer: ranks have equal masks for inputs that all of them have; of divided inputs, each
    has the part of its features.
    """

    def __init__(self, adapted: AdaptedLinear, mesh: DeviceMesh) -> None:
        """Divide a layer; its parameters may be on the meta device."""
        super().__init__(adapted, adapted.lora, adapted.dropout)
        self._mesh = mesh

    def _divide(self, base: Placement, down: Placement, up: Placement, outputs: Placement) -> None:
        """Make the parameters DTensors; biases and magnitudes, one for each output, are divided as `outputs`."""
        _distribute(self.base_layer, self._mesh, lambda weight: base if weight.ndim > 1 else outputs)
        _distribute(self.lora_A, self._mesh, lambda _: down)
        _distribute(self.lora_B, self._mesh, lambda _: up)
        _distribute(self.lora_magnitude_vector, self._mesh, lambda _: outputs)

    def _product(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the outputs, or its summands of them, without the bias."""
        return self.adapt(inputs, self._multiply(inputs))

    def _down(self, inputs: torch.Tensor, draw: Draw | None) -> torch.Tensor:
        down = _local(_only(self.lora_A))
        return functional.linear(inputs, down) if draw is None else draw.multiply(inputs, down)

    def _up(self, products: torch.Tensor) -> torch.Tensor:
        return functional.linear(products, _local(_only(self.lora_B)))

    def _multiply(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.linear(inputs, _local(_only(self.base_layer)))

    def _without_bias(self, output: torch.Tensor) -> torch.Tensor:
        return output  # `forward` adds it

    def _magnitudes(self) -> torch.Tensor:
        return _local(_only(self.lora_magnitude_vector))

    def _norms(self) -> torch.Tensor:
        base, down, up = (_local(_only(part)) for part in (self.base_layer, self.lora_A, self.lora_B))
        return self._sum(merged_squares(base, down, up, self.lora.scaling)).sqrt()

    @abstractmethod
    def _sum(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the sums over whole rows of the weight, from those over this rank's part of each."""


class ColwiseAdapter(DividedAdapter):
    """Inputs are DTensors of all tokens, whole on each rank; outputs are local tensors, of a rank's features."""

    def __init__(self, adapted: AdaptedLinear, mesh: DeviceMesh) -> None:
        super().__init__(adapted, mesh)
        self._divide(base=Shard(0), down=Replicate(), up=Shard(0), outputs=Shard(0))

    def forward(self, inputs: DTensor) -> torch.Tensor:  # type: ignore[override]
        """Return this rank's features, [B, T, outputs / ranks], for inputs [B, T, inputs]."""
        product = self._product(inputs.to_local(grad_placements=[Partial()]))
        return product if self.base_layer.bias is None else product + _local(self.base_layer.bias)

    def _sum(self, squares: torch.Tensor) -> torch.Tensor:
        return squares


class RowwiseAdapter(DividedAdapter):
    """Inputs are local tensors, of a rank's features; outputs too, of a rank's tokens."""

    def __init__(self, adapted: AdaptedLinear, mesh: DeviceMesh) -> None:
        super().__init__(adapted, mesh)
        self._divide(base=Shard(1), down=Shard(1), up=Replicate(), outputs=Replicate())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens, [B, T / ranks, outputs], for inputs [B, T, inputs / ranks]."""
        summed = DTensor.from_local(self._product(inputs), self._mesh, [Partial()], run_check=False)
        outputs = summed.redistribute(placements=[Shard(1)]).to_local()
        return outputs if self.base_layer.bias is None else outputs + _local(self.base_layer.bias)

    def _draw(self, inputs: torch.Tensor, dropout: Dropout) -> Draw:
        return dropout.draw(inputs, self._mesh.get_local_rank())

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
