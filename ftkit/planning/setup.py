"""What memory and step time are predicted from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from ftkit.config.model import ArchitectureSpec
from ftkit.config.training import EngineName, TrainingPlan
from ftkit.planning.estimates.gpus import Gpu


@dataclass(frozen=True)
class Setup:
    """What is trained, how, and on what.

    Attributes:
        shape: the model's.
        training: with nothing left open.
        num_shards: processes on all nodes, one for each GPU.
        engine: how the model is spread over them.
        device: what they compute on.
        gpu: its numbers; none: a CPU, or the profile names no GPU.
        num_nodes: nodes.
        node_bandwidth: bytes a second of a node's network; none: unknown, taken as no obstacle.
        keeps_weights: whether layers stay unsharded between forward and backward pass.
    """

    shape: ArchitectureSpec
    training: TrainingPlan
    num_shards: int = 1
    engine: EngineName = "fsdp2"
    device: Literal["cpu", "cuda"] = "cuda"
    gpu: Gpu | None = None
    num_nodes: int = 1
    node_bandwidth: float | None = None
    keeps_weights: bool = False

    def with_training(self, **changes: Any) -> Setup:
        """Return the setup with some fields of `training` changed."""
        return replace(self, training=self.training.model_copy(update=changes))
