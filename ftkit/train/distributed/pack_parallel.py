"""Context and tensor parallelism: the ranks of a group divide the tokens of each pack; kernels see whole packs.

Embedding, norms, residuals, output projection and loss are computed token by token.

* Context parallelism: before attention, an all-to-all gives each rank all tokens for its share of the heads; a second
  one returns the tokens afterwards (DeepSpeed Ulysses, Jacobs et al. 2023). Documents and sliding windows are therefore
  exact at any length.
* Tensor parallelism: the ranks also divide the matrices of each decoder layer. Before attention and before the
  feed-forward layer, an all-gather gives each rank all tokens for its share of the heads and of the inner dimension. A
  reduce-scatter then sums the results and returns the tokens (sequence parallelism, Korthikanti et al. 2022).

Adapters: colwise linear layers divide `lora_B`, rowwise ones `lora_A`. The other matrix is replicated on each rank, as
in Megatron, and its gradients are summed over the ranks, as those of norms. Adapters communicate no activations of
their own: their outputs are added to the base layer's before the sum over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
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
from transformers import AttentionInterface, PretrainedConfig

from ftkit.config.execution import indivisible_sizes
from ftkit.errors import TrainingError
from ftkit.models.adapters import ROWWISE, LoraSpec
from ftkit.models.families import MEASURED
from ftkit.train.model.adapted_linear import ADAPTER, AdaptedLinear, Draw
from ftkit.train.model.attention import Kernel, masked_attention, refuse_changed_scores
from ftkit.train.model.varlen_attention import VARLEN, varlen_attention
from ftkit.train.private_apis.torch import FSDP2_SETS_DIVISORS, Ctx, process_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ftkit.train.world import ContextGroup

_NAME = "ftkit_whole_packs"  # name in transformers of attention that separates documents by `cu_seqlens`
_LAYER_TYPES = {"full_attention", "sliding_attention"}
"""Types of layers in which only attention mixes tokens, with masks that `cu_seqlens` and a window describe."""
_TOKENS: Placement = Shard(1)  # layout of hidden states, [B, T, H], between matrices


def check_context_parallel(config: PretrainedConfig, kernel: Kernel, size: int, tensor_parallel: int = 1) -> None:
    heads = config.num_attention_heads
    if others := set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES:
        reason = f"its layers of type {', '.join(sorted(others))} carry a state from token to token"
    elif kernel not in {*VARLEN, "sdpa"}:
        reason = f"its attention needs the kernel '{kernel}', which does not take packs by 'cu_seqlens'"
    elif heads % (size * tensor_parallel):
        reason = f"its {heads} attention heads can't be divided among {size * tensor_parallel} GPUs"
    else:
        return
    raise TrainingError(
        f"training.context_parallel={size} can't train a '{config.model_type}': {reason}",
        fix="leave training.context_parallel out, or choose a divisor of the number of attention heads",
    )


def check_tensor_parallel(config: PretrainedConfig, kernel: Kernel, size: int) -> None:
    sizes = (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size)
    indivisible = indivisible_sizes(*sizes, size)
    if config.model_type not in MEASURED:
        reason = f"ftkit divides the layers of {', '.join(MEASURED)}"
    elif indivisible:
        name, number = next(iter(indivisible.items()))
        reason = f"its {number:,} {name} can't be divided among {size} GPUs"
    elif kernel not in {*VARLEN, "sdpa"}:
        reason = f"its attention needs the kernel '{kernel}', which does not take packs by 'cu_seqlens'"
    elif not FSDP2_SETS_DIVISORS:
        reason = f"torch {torch.__version__} can't combine it with FSDP2, versions from 2.9 on can"
    else:
        return
    raise TrainingError(
        f"training.tensor_parallel={size} can't train a '{config.model_type}': {reason}",
        fix="leave training.tensor_parallel out, or choose a divisor of these numbers",
    )


def whole_pack_attention(kernel: Kernel, exchange: ContextGroup) -> str:
    """Register attention over whole packs, because transformers' masks cover only a rank's tokens; return its name."""
    group = "" if exchange.group is None else exchange.group.group_name
    AttentionInterface.register(_NAME, partial(_attention, kernel=kernel, group=group, size=exchange.size))
    return _NAME


def _attention(  # noqa: PLR0913 - the interface is transformers'
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kernel: Kernel,
    group: str,
    size: int,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention within documents over the tokens of all ranks of a group.

    Shapes: query [B, H, S, D], key and value [B, K, S, D], with S tokens of each pack; returns [B, S, H, D].
    `cu_seq_lens_q` has the offsets in the full packs.
    """
    refuse_changed_scores(module, others)
    del attention_mask
    batch, heads, tokens, width = query.shape
    # Each rank needs a key-value head for its query heads.
    if (times := size // math.gcd(size, key.shape[1])) > 1:
        key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    parts = [each.transpose(1, 2).reshape(batch, tokens, size, -1) for each in (query, key, value)]
    if size > 1:  # exchange a rank's tokens of all heads for all tokens of its heads
        sent = torch.cat(parts, dim=-1).permute(2, 0, 1, 3).contiguous()
        received = all_to_all(sent, group).transpose(0, 1)  # [B, size, S, ...]
        parts = list(received.split([part.shape[-1] for part in parts], dim=-1))
    queries, keys, values = (
        part.reshape(batch * size * tokens, -1, each.shape[-1])
        for part, each in zip(parts, (query, key, value), strict=True)
    )
    scale = scaling if scaling is not None else 1 / math.sqrt(width)
    if kernel in VARLEN:
        output, _ = varlen_attention(queries, keys, values, cu_seq_lens_q, max_length_q, scale, sliding_window, kernel)
    else:
        output = masked_attention(queries, keys, values, cu_seq_lens_q, scale, sliding_window)
    if size > 1:
        sent = output.view(batch, size, tokens, -1).transpose(0, 1).contiguous()
        output = all_to_all(sent, group).permute(1, 2, 0, 3)  # [B, S, size, ...]
    return output.reshape(batch, tokens, heads, -1), None


# A custom operator, because the compiler doesn't trace into it. Operators can't take groups, so it takes the name.
@torch.library.custom_op("ftkit::all_to_all", mutates_args=())
def all_to_all(sent: torch.Tensor, group: str) -> torch.Tensor:
    """Send the i-th part of a contiguous tensor, [size, ...], to rank i of a group; return the received parts."""
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=process_group(group))
    return received


@all_to_all.register_fake
def _(sent: torch.Tensor, _: str) -> torch.Tensor:
    return torch.empty_like(sent)


def _save_group(ctx: Ctx, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
    del output
    ctx.group = inputs[1]


def _backward(ctx: Ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return all_to_all(gradient.contiguous(), ctx.group), None


all_to_all.register_autograd(_backward, setup_context=_save_group)


def divide_layers(layers: nn.ModuleList, family: str, mesh: DeviceMesh, adapters: LoraSpec | None = None) -> None:
    """Divide the matrices of decoder layers among the ranks of a 1-D mesh, and all-gather their inputs.

    Norms are replicated on each rank, with summed gradients. OLMo 3's norms over all heads are divided with the heads.
    """
    for layer in layers:
        names = [name for name, module in layer.named_children() if type(module).__name__.endswith("Norm")]
        styles = dict.fromkeys(names, SequenceParallel(use_local_output=True)) | _styles(family)
        if adapters is not None:
            for name in [name for name in styles if name.rpartition(".")[2] in adapters.targets]:
                del styles[name]
                kind = _RowwiseAdapter if name.rpartition(".")[2] in ROWWISE else _ColwiseAdapter
                layer.set_submodule(name, kind(cast("AdaptedLinear", layer.get_submodule(name)), mesh))
        is_trained = {name: parameter.requires_grad for name, parameter in layer.named_parameters()}
        parallelize_module(layer, mesh, styles)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(is_trained[name])  # torch's styles of norms make their weights trainable


def _styles(family: str) -> dict[str, ParallelStyle]:
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
        "mlp": PrepareModuleInput(input_layouts=_TOKENS, desired_input_layouts=Replicate()),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=_TOKENS),
    }


class _DividedNorm(ParallelStyle):
    """An RMS norm over all heads, if each rank has some of them: the mean square is summed over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def as_part(_: nn.Module, inputs: tuple[torch.Tensor], mesh: DeviceMesh) -> Any:
            return DTensor.from_local(inputs[0], mesh, [Shard(2)], run_check=False)

        def as_local(_: nn.Module, output: DTensor, __: DeviceMesh) -> Any:
            return output.redistribute(placements=[Shard(2)]).to_local()

        _distribute(module, device_mesh, lambda _: Shard(0))
        return distribute_module(module, device_mesh, None, as_part, as_local)


class _DividedAdapter(AdaptedLinear):
    """A frozen linear layer with its adapter, divided among ranks; parameters have peft's names.

    Dropout is the same as for the whole layer: ranks draw equal masks for replicated inputs, and the part for their
    features of divided inputs.
    """

    def __init__(
        self, adapted: AdaptedLinear, mesh: DeviceMesh, *, base: Placement, down: Placement, up: Placement
    ) -> None:
        """Convert the parameters to DTensors; biases and magnitudes, one per output, are divided as `up`."""
        super().__init__(adapted, adapted.lora, adapted.effect, adapted.dropout)
        self._mesh = mesh
        _distribute(self.base_layer, mesh, lambda weight: base if weight.ndim > 1 else up)
        _distribute(self.lora_A, mesh, lambda _: down)
        _distribute(self.lora_B, mesh, lambda _: up)
        _distribute(self.lora_magnitude_vector, mesh, lambda _: up)

    def _down(self, inputs: torch.Tensor, draw: Draw | None) -> torch.Tensor:
        down = self._weight_of(self.lora_A[ADAPTER])
        return functional.linear(inputs, down) if draw is None else draw.multiply(inputs, down)

    def _up(self, products: torch.Tensor) -> torch.Tensor:
        return functional.linear(products, self._weight_of(self.lora_B[ADAPTER]))

    def _multiply(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.linear(inputs, self._weight_of(self.base_layer))

    def _without_bias(self, output: torch.Tensor) -> torch.Tensor:
        return output  # `forward` adds it

    def _weight_of(self, module: nn.Module) -> torch.Tensor:
        return _local(cast("nn.Parameter", module.weight))


class _ColwiseAdapter(_DividedAdapter):
    """Inputs are DTensors of all tokens, replicated on each rank; outputs are local tensors of a rank's features."""

    def __init__(self, adapted: AdaptedLinear, mesh: DeviceMesh) -> None:
        super().__init__(adapted, mesh, base=Shard(0), down=Replicate(), up=Shard(0))

    def forward(self, inputs: DTensor) -> torch.Tensor:  # type: ignore[override]
        """Return this rank's features, [B, T, outputs / ranks], for inputs [B, T, inputs]."""
        local = inputs.to_local(grad_placements=[Partial()])
        product = self.adapt(local, self._multiply(local))  # without the bias
        return product if self.base_layer.bias is None else product + _local(self.base_layer.bias)


class _RowwiseAdapter(_DividedAdapter):
    """Inputs are local tensors of a rank's features; outputs are local tensors of a rank's tokens."""

    def __init__(self, adapted: AdaptedLinear, mesh: DeviceMesh) -> None:
        super().__init__(adapted, mesh, base=Shard(1), down=Shard(1), up=Replicate())
        self._input_part = mesh.get_local_rank()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens, [B, T / ranks, outputs], for inputs [B, T, inputs / ranks]."""
        summands = self.adapt(inputs, self._multiply(inputs))  # without the bias
        summed = DTensor.from_local(summands, self._mesh, [Partial()], run_check=False)
        outputs = summed.redistribute(placements=[Shard(1)]).to_local()
        return outputs if self.base_layer.bias is None else outputs + _local(self.base_layer.bias)

    def _sum(self, squares: torch.Tensor) -> torch.Tensor:
        summed = DTensor.from_local(squares, self._mesh, [Partial()], run_check=False)
        return summed.redistribute(placements=[Replicate()]).to_local()


def _distribute(owner: nn.Module, mesh: DeviceMesh, placement_of: Callable[[nn.Parameter], Placement]) -> None:
    for module in owner.modules():
        for name, parameter in module.named_parameters(recurse=False):
            divided = distribute_tensor(parameter, mesh, [placement_of(parameter)])
            module.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's part on this rank; the gradient of a replicated one is a partial sum."""
    divided = cast("DTensor", parameter)
    return divided.to_local(grad_placements=[Partial()] if divided.placements[0].is_replicate() else None)
