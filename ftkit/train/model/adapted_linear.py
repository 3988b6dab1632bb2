"""The forward of a linear layer with an adapter: peft's, with less memory and fewer kernels.

* Neither masks of dropout, dropped inputs nor dequantized weights are saved for the backward pass.
* DoRA's norms need neither the product of an identity matrix by both adapters, nor a copy of that in the input's dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from ftkit.train.model.linears import is_transposed

if TYPE_CHECKING:
    from ftkit.config.adapters import LoraSpec
    from ftkit.train.model.dropout import Draw, Dropout

ADAPTER = "default"
"""peft's default name for an adapter; part of its parameters' names."""


class AdaptedLinear(nn.Module):
    """A frozen linear layer with an adapter; parameters have peft's names.

    Attributes:
        base_layer: the frozen layer.
        lora_A: peft's dictionary with the matrix [rank, num_inputs].
        lora_B: that with the matrix [num_outputs, rank].
        lora_magnitude_vector: that with DoRA's magnitudes, [num_outputs]; empty for LoRA.
        dropout: of the adapter's inputs in training; None for none.
    """

    def __init__(self, adapted: nn.Module, lora: LoraSpec, dropout: Dropout | None = None) -> None:
        """Adopt the parts of peft's layer; its parameters may be on the meta device."""
        super().__init__()
        self.lora, self.dropout = lora, dropout
        self.base_layer = cast("nn.Linear", adapted.base_layer)
        self.lora_A, self.lora_B = (cast("nn.ModuleDict", part) for part in (adapted.lora_A, adapted.lora_B))
        self.lora_magnitude_vector = cast("nn.ModuleDict", adapted.lora_magnitude_vector)

    @property
    def weight(self) -> torch.Tensor:
        """The frozen weights, as of a layer without an adapter, for code of families that reads them."""
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The frozen bias, likewise."""
        return self.base_layer.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return outputs, [..., num_outputs], for inputs [..., num_inputs]."""
        return self.adapt(inputs, self.base_layer(inputs))

    def adapt(self, inputs: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return the base layer's output, changed by the adapter.

        As peft computes it: the base layer's inputs are not dropped, except those that DoRA scales; its norms are
        constants for autograd (Liu et al. 2024, section 4.3).
        """
        draw = self._draw(inputs, self.dropout) if self.training and self.dropout is not None else None
        adapted = self._up(self._down(inputs, draw)) * self.lora.scaling
        if not self.lora.use_dora:
            return (output + adapted).to(output.dtype)
        base = self._without_bias(output) if draw is None else self._multiply(draw.drop(inputs))
        scales = self._magnitudes() / self._norms()
        return (output + (scales - 1) * base + scales * adapted).to(output.dtype)

    def _draw(self, inputs: torch.Tensor, dropout: Dropout) -> Draw:
        """Draw dropout for the adapter's inputs."""
        return dropout.draw(inputs)

    def _down(self, inputs: torch.Tensor, draw: Draw | None) -> torch.Tensor:
        """Multiply by `lora_A`, called as a module where possible: engines gather the parameters of modules."""
        down = self.lora_A[ADAPTER]
        product: torch.Tensor = down(inputs) if draw is None else draw.multiply(inputs, cast("nn.Linear", down).weight)
        return product

    def _up(self, products: torch.Tensor) -> torch.Tensor:
        """Multiply by `lora_B`."""
        product: torch.Tensor = self.lora_B[ADAPTER](products)
        return product

    def _multiply(self, inputs: torch.Tensor) -> torch.Tensor:
        """Multiply by the frozen matrix, without the bias."""
        return self._without_bias(self.base_layer(inputs))

    def _without_bias(self, output: torch.Tensor) -> torch.Tensor:
        return output if self.bias is None else output - self.bias

    def _magnitudes(self) -> torch.Tensor:
        return cast("torch.Tensor", self.lora_magnitude_vector[ADAPTER].weight)

    def _norms(self) -> torch.Tensor:
        """Return the norms of the rows of the merged weight, in fp32."""
        base = self.weight.T if is_transposed(self.base_layer) else self.weight
        down, up = (cast("torch.Tensor", part[ADAPTER].weight) for part in (self.lora_A, self.lora_B))
        return merged_squares(base, down, up, self.lora.scaling).sqrt()


@torch.no_grad()
def merged_squares(base: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the sums of squares of the rows of `base + scaling * up @ down`, in fp32.

    Autocast does not change products in place. A block without autocast would keep graphs out of the compiler's caches.
    """
    merged = base.to(torch.float32, copy=True).addmm_(up.float(), down.float(), alpha=scaling)
    return merged.square().sum(dim=1)
