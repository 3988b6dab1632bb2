"""The loss: cross-entropy summed over the target tokens of a batch."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn import functional


@dataclass(frozen=True)
class MicroBatch:
    """What one process computes at a time. B packs of T tokens hold N targets.

    Attributes:
        tokens: int64 [B, T].
        positions: int64 [B, T]; they restart at 0 with each document, which is all that keeps documents apart.
        target_index: int64 [N], places in the flattened tokens whose next token counts.
        targets: int64 [N], those next tokens.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    target_index: torch.Tensor
    targets: torch.Tensor


def _summed_loss(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Return the cross-entropy summed over the targets, in fp32.

    Logits are computed for the targets alone. There is never an attention mask and never a cache: either would
    make transformers overlook the borders of packed documents.
    """
    hidden = model.base_model(
        input_ids=batch.tokens, position_ids=batch.positions, attention_mask=None, use_cache=False
    ).last_hidden_state
    kept = hidden.flatten(0, 1).index_select(0, batch.target_index)
    logits = model.get_output_embeddings()(kept)
    return functional.cross_entropy(logits.float(), batch.targets, reduction="sum")


def add_objective(model: nn.Module) -> None:
    """Give the model a method `summed_loss(batch)`, which gathers the shards as its `forward` does.

    A method rather than a wrapper, so that the names of its parameters stay those of the family.
    """
    object.__setattr__(model, "summed_loss", types.MethodType(_summed_loss, model))
    register_fsdp_forward_method(model, "summed_loss")


def summed_loss(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Return the cross-entropy of a model that has an objective, summed over the targets."""
    loss: torch.Tensor = model.summed_loss(batch)
    return loss
