"""Linear layers with adapters that compute peft's forward with less memory and fewer kernels.

* The backward pass needs no saved dropout masks, dropped inputs or dequantized weights.
* DoRA's norms need neither the product of an identity matrix with both adapters, nor its copy in the input's dtype.
* Dropout masks depend only on the seed, the token, the adapter and the feature. They are the same on any number of
  processes, in any micro-batches, in recomputed layers, compiled or not, and after a resume. `nn.Dropout` draws masks
  in the order of calls, and saves one for each input. Here, only keys are saved, and masks are recomputed.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ftkit.train import gpu_kernels
from ftkit.train.model.linears import is_transposed, opaque_zero

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ftkit.models.adapters import LoraSpec
    from ftkit.train.private_apis.torch import Ctx


ADAPTER = "default"  # peft's default name for an adapter; part of its parameters' names


class AdaptedLinear(nn.Module):
    """A frozen linear layer with an adapter; parameters have peft's names, in peft's dictionaries of modules.

    `lora_A` has a matrix [rank, num_inputs], and `lora_B` [num_outputs, rank]. `lora_magnitude_vector` has DoRA's
    magnitudes, [num_outputs], and is empty for LoRA.
    """

    def __init__(
        self, adapted: nn.Module, lora: LoraSpec, effect: torch.Tensor, dropout: Dropout | None = None
    ) -> None:
        """Adopt the parts of peft's layer; its parameters may be on the meta device.

        `effect`, fp32 [], scales the adapter's output in all layers: 1, or 0 to turn adapters off. With a number, or
        with layers that skip their adapters, the compiler would fuse other operations, which round differently in bf16:
        log-probabilities of a completion differed by 4e-4.
        """
        super().__init__()
        self.lora, self.effect, self.dropout = lora, effect, dropout
        self._input_part = 0  # index of this rank's part if ranks divide the features of inputs
        self.base_layer = cast("nn.Linear", adapted.base_layer)
        self.lora_A, self.lora_B = (cast("nn.ModuleDict", part) for part in (adapted.lora_A, adapted.lora_B))
        self.lora_magnitude_vector = cast("nn.ModuleDict", adapted.lora_magnitude_vector)

    @property
    def weight(self) -> torch.Tensor:
        """The frozen weights, for families whose code reads `weight`."""
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return outputs, [..., num_outputs], for inputs [..., num_inputs]."""
        output: torch.Tensor = self.base_layer(inputs)
        return self.adapt(inputs, output)

    def adapt(self, inputs: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return the base layer's output with the adapter applied, as peft computes it.

        Dropout does not apply to the base layer's inputs, except for the product that DoRA scales. DoRA's norms are
        detached (Liu et al. 2024, section 4.3).
        """
        draw = self.dropout.draw(inputs, self._input_part) if self.training and self.dropout is not None else None
        # Scale here, not at the output's width, so that the gradient needs no scaled copy of that width.
        adapted = self._up(self._down(inputs, draw) * (self.effect * self.lora.scaling))
        if not self.lora.use_dora:
            return (output + adapted).to(output.dtype)
        scales = self._weight_of(self.lora_magnitude_vector[ADAPTER]) / self._norms()
        if draw is None:
            scaled = _scale(self._without_bias(output) + adapted, 1 + self.effect * (scales - 1))
            return scaled if self.bias is None else (scaled + self.bias).to(output.dtype)
        base = self._multiply(draw.drop(inputs))
        return (output + self.effect * (scales - 1) * base + scales * adapted).to(output.dtype)

    def _norms(self) -> torch.Tensor:
        parts = (self.base_layer, self.lora_A[ADAPTER], self.lora_B[ADAPTER])
        base, down, up = (self._weight_of(part) for part in parts)
        base = base.T if is_transposed(self.base_layer) else base
        return self._sum(merged_squares(base, down, up, self.lora.scaling)).sqrt()

    # The methods below differ if ranks divide the layer.

    def _down(self, inputs: torch.Tensor, draw: Draw | None) -> torch.Tensor:
        """Multiply by `lora_A`, called as a module if possible: engines all-gather parameters in hooks of modules."""
        down = self.lora_A[ADAPTER]
        product: torch.Tensor = down(inputs) if draw is None else draw.multiply(inputs, cast("nn.Linear", down).weight)
        return product

    def _up(self, products: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.lora_B[ADAPTER](products)
        return product

    def _multiply(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._without_bias(self.base_layer(inputs))

    def _without_bias(self, output: torch.Tensor) -> torch.Tensor:
        return output if self.bias is None else output - self.bias

    def _weight_of(self, module: nn.Module) -> torch.Tensor:
        return cast("torch.Tensor", module.weight)

    def _sum(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the sums over whole rows of the weight, given the sums over this rank's part of each row."""
        return squares


@torch.no_grad()
def merged_squares(base: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the sums of squares of the rows of `base + scaling * up @ down` in fp32, without materializing the sum.

    |w + s u A|^2 = |w|^2 + s u (2 A w + s A A^T u) for a row w of the base and u of `up`. Products with the base are in
    the base's dtype.
    """
    up, square = up.float(), down.float() @ down.float().T
    crossed = (base @ down.to(base.dtype).T).float()
    changes = (up * (2 * crossed + scaling * (up @ square))).sum(dim=1)
    return (base.float().square().sum(dim=1) + scaling * changes).clamp_min(0)


def _scale(inputs: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return `inputs * scales`, [..., N] by [N], in the inputs' dtype.

    In eager mode, outputs can't be saved for the backward pass: OLMo, among others, changes them in place.
    """
    if not torch.compiler.is_compiling():
        return (inputs * scales).to(inputs.dtype)
    scaled: torch.Tensor = _Scaled.apply(inputs, scales)  # type: ignore[no-untyped-call]
    return scaled


class _Scaled(torch.autograd.Function):
    """`_scale` that saves its output, which layers mostly save anyway, instead of its inputs."""

    @staticmethod
    def forward(ctx: Ctx, inputs: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        output = (inputs * scales).to(inputs.dtype)
        ctx.save_for_backward(output, scales)
        return output

    @staticmethod
    def backward(ctx: Ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, scales = ctx.saved_tensors
        of_products = (gradient.float() * output.float()).flatten(0, -2).sum(dim=0)
        return (gradient * scales).to(gradient.dtype), of_products / scales


def token_keys(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 64 random bits per token, given its number in the order of the data; they are unique.

    This is the finalizer of SplitMix64 (Steele et al. 2014), a bijection.
    """
    keys = numbers.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys = (keys ^ keys >> np.uint64(shift)) * np.uint64(factor)
    return (keys ^ keys >> np.uint64(31)).view(np.int64)


class TokenKeys:
    """The keys of the tokens of the current micro-batch, int64 [B, T], which all adapters of a model read."""

    def __init__(self, probability: float = 0.0, seed: int = 0) -> None:
        self._probability, self._seed = probability, seed
        self.keys = torch.zeros(0, dtype=torch.int64)

    def dropout_of(self, name: str) -> Dropout | None:
        return Dropout(self._probability, self, f"{self._seed} {name}") if self._probability else None

    @classmethod
    def of(cls, model: nn.Module) -> TokenKeys:
        """Return the `TokenKeys` of a model's adapters, or unused ones if it has no dropout."""
        return next((each.tokens for each in model.modules() if isinstance(each, Dropout)), cls())


class Dropout(nn.Module):
    """Dropout of one adapter's inputs, from the token keys that a model's adapters share.

    `key`, int64 [], has random bits of the seed and the adapter: a tensor, so that layers share one compiled graph.
    """

    key: torch.Tensor

    def __init__(self, probability: float, tokens: TokenKeys, identity: str) -> None:
        super().__init__()
        self.probability, self.tokens = probability, tokens
        key = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big", signed=True)
        self.register_buffer("key", torch.tensor(key, device="cpu"), persistent=False)

    def draw(self, inputs: torch.Tensor, part: int = 0, keys: torch.Tensor | None = None) -> Draw:
        """Return the masks of inputs, [..., K]; `part` is the index of their part of the features.

        Pass `keys`, int64 [N], if rows are not the tokens in order. Without them, such rows (an expert's tokens in
        transformers 4, zeros in Zaya) have masks that depend on the micro-batch.
        """
        width = inputs.shape[-1]
        num_rows = inputs.shape[:-1].numel()
        keys = self.tokens.keys.flatten() if keys is None else keys
        if len(keys) != num_rows:
            keys = keys.repeat(-(-num_rows // len(keys)))[:num_rows]
        return Draw(keys, self.key, self.probability, part * width)


class Draw(NamedTuple):
    """The dropout masks of an adapter's inputs in a micro-batch, as arguments of `gpu_kernels.drop`."""

    rows: torch.Tensor
    key: torch.Tensor
    probability: float
    first: int

    def drop(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply dropout to inputs, [..., K] with N rows."""
        dropped: torch.Tensor = _Dropped.apply(inputs, *self)  # type: ignore[no-untyped-call]
        return dropped

    def multiply(self, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return `linear(drop(inputs), weight)`; save the inputs, [..., K], before dropout."""
        product: torch.Tensor = _DroppedProduct.apply(inputs, weight, *self)  # type: ignore[no-untyped-call]
        return product


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Ctx, inputs: torch.Tensor, rows: torch.Tensor, key: torch.Tensor, probability: float, first: int
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, key)
        ctx.settings = probability, first
        return gpu_kernels.drop(inputs, rows, key, probability, first)

    @staticmethod
    def backward(ctx: Ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, key = ctx.saved_tensors
        return gpu_kernels.drop(gradient, rows, _after(gradient, key), *ctx.settings), None, None, None, None


class _DroppedProduct(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - those of `Draw`
        ctx: Ctx,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        rows: torch.Tensor,
        key: torch.Tensor,
        probability: float,
        first: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight, rows, key)
        ctx.settings = probability, first
        return functional.linear(gpu_kernels.drop(inputs, rows, key, probability, first), weight)

    @staticmethod
    def backward(ctx: Ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight, rows, key = ctx.saved_tensors
        key = _after(gradient, key)
        of_inputs = of_weight = None
        if ctx.needs_input_grad[0]:
            of_inputs = gpu_kernels.drop(gradient @ weight.to(gradient.dtype), rows, key, *ctx.settings)
        if ctx.needs_input_grad[1]:
            dropped = gpu_kernels.drop(inputs, rows, key, *ctx.settings).to(gradient.dtype)
            of_weight = (gradient.flatten(0, -2).T @ dropped.flatten(0, -2)).to(weight.dtype)
        return of_inputs, of_weight, None, None, None, None


def _after(gradient: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the key, dependent on `gradient`, so that a compiler recomputes the masks instead of saving them."""
    return key + opaque_zero(gradient) if torch.compiler.is_compiling() else key
