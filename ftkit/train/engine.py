"""What the loop needs of an engine. Engines differ behind this protocol and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch
    from torch import nn

    from ftkit.train.causal_lm import MicroBatch
    from ftkit.train.distributed.checks import ShardingStats

InitWeights = Callable[["nn.Module"], None]
"""Puts the first values into a sharded model; an engine calls it once parameters have memory."""


class Engine(Protocol):
    """A sharded model with its optimizer."""

    model: nn.Module

    def sharding_stats(self) -> ShardingStats:
        """Return what is true of the model on this rank, for the proofs."""

    def backward(self, batch: MicroBatch, num_targets: int, *, is_last: bool) -> torch.Tensor:
        """Run forward and backward on a micro-batch.

        Gradients are those of the mean loss over the `num_targets` targets of the whole step, over all ranks.
        They are reduced over the ranks by the last micro-batch of the step at the latest.

        Returns:
            The loss summed over this micro-batch's targets: fp32, no gradient.
        """

    def inference(self) -> AbstractContextManager[nn.Module]:
        """Give the model for evaluation, without gradients."""

    def probe(self) -> AbstractContextManager[nn.Module]:
        """Give the model as it is trained, with gradients; none of them reaches the parameters.

        One forward pass, and no backward pass or one by `torch.autograd.grad`.
        """

    def step(self, learning_rate: float, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to a global norm, update the weights and clear the gradients.

        Returns:
            The norm that the gradients had.
        """

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return what this rank holds from step to step: its parts of parameters, gradients, optimizer states."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: trained weights and optimizer states, as shards, not copied."""

    def load(self, folder: Path) -> None:
        """Read back a state that was written to a folder, at any world size."""

    def trained_weights(self) -> dict[str, torch.Tensor]:
        """Return the trained weights, whole and in main memory, on rank 0; an empty dictionary elsewhere."""
