"""Tensor parallelism: the ranks of a group divide the matrices of each decoder layer, and the tokens of each pack.

Between matrices, a rank has its part of each pack's tokens, as with context parallelism: embedding, norms, residuals,
output projection and loss are computed token by token. Before attention and before the feed-forward layer, an
all-gather gives it all tokens, for its share of the heads and of the inner dimension; after them a reduce-scatter sums
the results and returns the tokens (sequence parallelism, Korthikanti et al. 2022). Attention kernels see whole packs.

Adapters: of a colwise linear layer, `lora_B` is divided; of a rowwise one, `lora_A`. The other matrix is unsharded on
each rank, as in Megatron, and its gradients are summed over the ranks like those of norms. Adapters exchange no
activations of their own: their outputs join the base layer's before these are summed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from transformers import AttentionInterface

from ftkit.config.execution import indivisible_sizes
from ftkit.errors import TrainingError
from ftkit.models.adapters import ROWWISE
from ftkit.models.families import MEASURED
from ftkit.train.model.adapted_linear import AdaptedLinear, merged_squares
from ftkit.train.model.attention import masked_attention, refuse_changed_scores, register_kernel
from ftkit.train.private_apis.torch import FSDP2_SETS_DIVISORS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PretrainedConfig

    from ftkit.models.adapters import LoraSpec
    from ftkit.train.model.adapted_linear import Draw, Dropout
    from ftkit.train.model.attention import Kernel

_NAME = "ftkit_whole_packs"
"""transformers' name of attention by SDPA that finds documents by `cu_seqlens`."""
_TOKENS: Placement = Shard(1)
"""Layout of hidden states, [B, T, H], between matrices."""


def check_tensor_parallel(config: PretrainedConfig, kernel: Kernel, size: int) -> None:
    """Check that the decoder layers of a model can be divided among `size` ranks.

    Raises:
        TrainingError: they can't, or this version of torch can't train them.
    """
    sizes = (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size)
    indivisible = indivisible_sizes(*sizes, size)
    if config.model_type not in MEASURED:
        reason = f"ftkit divides the layers of {', '.join(MEASURED)}"
    elif indivisible:
        name, number = next(iter(indivisible.items()))
        reason = f"its {number:,} {name} can't be divided among {size} GPUs"
    elif kernel not in {"flash4", "sdpa"}:
        reason = f"its attention needs the kernel '{kernel}', which does not take packs by 'cu_seqlens'"
    elif not FSDP2_SETS_DIVISORS:
        reason = f"torch {torch.__version__} can't combine it with FSDP2, versions from 2.9 on can"
    else:
        return
    raise TrainingError(
        f"training.tensor_parallel={size} can't train a '{config.model_type}': {reason}",
        fix="leave training.tensor_parallel out, or choose a divisor of these numbers",
    )


def whole_pack_attention(kernel: Kernel) -> str:
    """Register attention over whole packs with transformers, whose own masks are for a rank's tokens; return its name.

    The heads are those of this rank.
    """
    if kernel == "flash4":
        return register_kernel(kernel)
    AttentionInterface.register(_NAME, _attention)
    return _NAME


def _attention(  # noqa: PLR0913 - the interface is transformers'
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention within documents.

    Shapes: query [B, H, T, D], key and value [B, K, T, D]; returns [B, T, H, D].
    """
    refuse_changed_scores(module, others)
    del attention_mask
    batch, _, length, width = query.shape
    query, key, value = (each.transpose(1, 2).reshape(batch * length, -1, width) for each in (query, key, value))
    scale = scaling if scaling is not None else 1 / math.sqrt(width)
    output = masked_attention(query, key, value, cu_seq_lens_q, scale, sliding_window)
    return output.view(batch, length, -1, width), None


def divide_layers(layers: nn.ModuleList, family: str, mesh: DeviceMesh, adapters: LoraSpec | None = None) -> None:
    """Divide the matrices of decoder layers among the ranks of a mesh of one dimension, and have their inputs gathered.

    Parameters may be on the meta device. Norms are whole on each rank, and their gradients are summed over the ranks;
    OLMo 3's norms of all heads are divided with the heads.
    """
    for layer in layers:
        names = [name for name, module in layer.named_children() if type(module).__name__.endswith("Norm")]
        norms = dict.fromkeys(names, SequenceParallel(use_local_output=True))
        styles = norms | _attention_styles(family) | _mlp_styles()
        if adapters is not None:
            for name in [name for name in styles if name.rpartition(".")[2] in adapters.targets]:
                del styles[name]
                kind = RowwiseAdapter if name.rpartition(".")[2] in ROWWISE else ColwiseAdapter
                layer.set_submodule(name, kind(cast("AdaptedLinear", layer.get_submodule(name)), mesh))
        is_trained = {name: parameter.requires_grad for name, parameter in layer.named_parameters()}
        parallelize_module(layer, mesh, styles)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(is_trained[name])  # torch's styles of norms make their weights trainable


def _attention_styles(family: str) -> dict[str, ParallelStyle]:
    """Return the styles of attention by the modules' names, with those of its norms of queries and keys."""
    norms: dict[str, ParallelStyle] = {
        "qwen3": SequenceParallel(sequence_dim=2, use_local_output=True),  # of [B, T, heads, D]
        "gemma3_text": SequenceParallel(sequence_dim=1, use_local_output=True),  # of [B, heads, T, D]
        "olmo3": _DividedNorm(),
    }
    gathered = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": _TOKENS}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    )
    return {
        "self_attn": gathered,
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        **({f"self_attn.{name}_norm": norms[family] for name in "qk"} if family in norms else {}),
        "self_attn.o_proj": RowwiseParallel(output_layouts=_TOKENS),
    }


def _mlp_styles() -> dict[str, ParallelStyle]:
    """Return the styles of the feed-forward layer by the modules' names."""
    return {
        "mlp": PrepareModuleInput(input_layouts=_TOKENS, desired_input_layouts=Replicate()),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=_TOKENS),
    }


class _DividedNorm(ParallelStyle):
    """An RMS norm over all heads, of which each rank has some: the mean square is summed over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._divide, self._as_part, self._as_local)

    @staticmethod
    def _divide(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        weight = module.get_parameter("weight")
        divided = distribute_tensor(weight, mesh, [Shard(0)])
        module.register_parameter("weight", nn.Parameter(divided, requires_grad=weight.requires_grad))

    @staticmethod
    def _as_part(_: nn.Module, inputs: tuple[torch.Tensor], mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, [Shard(2)], run_check=False)

    @staticmethod
    def _as_local(_: nn.Module, output: DTensor, __: DeviceMesh) -> Any:
        return output.redistribute(placements=[Shard(2)]).to_local()


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
