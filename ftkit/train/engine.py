"""The interface between the loop and an engine. Engines differ only behind this protocol."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ftkit.config.training import ActivationCheckpointing
from ftkit.train.memory.activation_checkpointing import activation_checkpointing_of, is_offloaded
from ftkit.train.model.expert_adapters import GroupedExperts
from ftkit.train.model.hf_model import find_decoder_layers
from ftkit.train.model.linears import QuantizedLinear
from ftkit.train.model.vision import vision_layers

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from ftkit.train.causal_lm import CausalLM, MicroBatch, SourceLosses

State = dict[str, Any]
"""State of an engine for a checkpoint: nested dictionaries and lists of tensors, by their names in the checkpoint."""

InitWeights = Callable[["nn.Module"], None]
"""Initializes or loads the parameters of a sharded transformers model; an engine calls it once they have memory."""


@dataclass(frozen=True)
class ShardingStats:
    """How a model is sharded, as seen by one rank. Elements count parameters of the unsharded model."""

    num_layers: int
    num_units: int  # modules whose parameters are all-gathered together
    num_sharded_layers: int  # decoder layers that are units
    checkpointed_layers: Mapping[ActivationCheckpointing, int]
    total_elements: int  # a 4-bit matrix counts as the weights that it encodes
    local_elements: int
    max_local_elements: int  # an even share
    trainable_elements: int
    quantized_elements: int = 0
    offloaded_layers: int = 0  # decoder layers that save their activations in host memory
    num_vision_layers: int = 0  # layers of vision encoders, each a unit
    is_unsharded: bool = False  # valid only on one process, whose even share is the whole model


def collect_sharding_stats(
    hf_model: PreTrainedModel,
    shard_of: Callable[[nn.Parameter], tuple[int, int, int]],
    num_units: int,
    num_sharded_layers: int,
    *,
    is_unsharded: bool = False,
) -> ShardingStats:
    """Count elements; `shard_of` returns a parameter's elements: in total, on this rank, and at most on this rank."""
    layers = find_decoder_layers(hf_model)
    shards = {parameter: shard_of(parameter) for parameter in hf_model.parameters()}
    layouts = [module.layout for module in hf_model.modules() if isinstance(module, QuantizedLinear)]
    for module in hf_model.modules():
        if isinstance(module, GroupedExperts):
            layouts += [layout for name, layout in module.layouts.items() for _ in range(module.sizes[name][0])]
    quantized = sum(layout.num_weights for layout in layouts)
    stored_for_quantized = sum(layout.num_stored for layout in layouts)
    return ShardingStats(
        num_layers=len(layers),
        num_vision_layers=len(vision_layers(hf_model)),
        num_units=num_units,
        num_sharded_layers=num_sharded_layers,
        checkpointed_layers=Counter(activation_checkpointing_of(layer) for layer in layers),
        total_elements=sum(total for total, _, _ in shards.values()) - stored_for_quantized + quantized,
        local_elements=sum(local for _, local, _ in shards.values()),
        max_local_elements=sum(allowed for _, _, allowed in shards.values()),
        trainable_elements=sum(total for parameter, (total, _, _) in shards.items() if parameter.requires_grad),
        quantized_elements=quantized,
        offloaded_layers=sum(is_offloaded(layer) for layer in layers),
        is_unsharded=is_unsharded,
    )


class Engine(Protocol):
    """A sharded model with its optimizer."""

    model: CausalLM

    def sharding_stats(self) -> ShardingStats:
        """Return how the model is sharded, for the checks before step 1."""

    def forward(self, batch: MicroBatch, source_losses: SourceLosses | None = None) -> torch.Tensor:
        """Return the loss summed over a micro-batch's labels or pairs, in fp32; also add it to `source_losses`."""

    def backward(self, loss: torch.Tensor, num_labels: int, *, is_last: bool) -> None:
        """Accumulate the gradients of the mean loss over a step's labels, or pairs.

        `num_labels` counts the step's labels or pairs over all ranks and micro-batches. Gradients are reduced over the
        ranks by the end of the step's last micro-batch.
        """

    def step(self, learning_rate: float, max_norm: float) -> torch.Tensor:
        """Clip the global gradient norm, update the weights, clear the gradients; return the norm before clipping.

        The norm is a scalar on the device. If it is not finite, weights and optimizer states do not change on any rank.
        """

    def inference(self) -> AbstractContextManager[CausalLM]:
        """Yield the model for evaluation, without gradients."""

    def probe(self) -> AbstractContextManager[CausalLM]:
        """Yield the model in training mode, for one forward pass and at most one `torch.autograd.grad`.

        No gradients are accumulated in the parameters.
        """

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors that this rank keeps between steps: parameters, gradients, and optimizer states."""

    def state(self) -> State:
        """Return the state for a checkpoint: trained weights and optimizer states, as shards, not copied."""

    def load(self, folder: Path) -> None:
        """Load a state from a checkpoint's folder, written at any world size."""

    def trained_weights(self) -> dict[str, torch.Tensor]:
        """Return the trained weights, unsharded and in host memory, on rank 0; an empty dictionary elsewhere."""
