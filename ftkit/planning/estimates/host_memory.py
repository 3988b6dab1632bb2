"""Predict the host memory of a node that offloaded tensors take."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import TYPE_CHECKING, Final

from ftkit.config.execution import GIB
from ftkit.models.parameters import count_model
from ftkit.planning.estimates.memory import FP32, Sizes

if TYPE_CHECKING:
    from ftkit.planning.setup import Setup

PROCESS_GIB: Final = 4.0
"""Host memory of a process without offloaded tensors: torch, CUDA and NCCL. Assumed."""


@dataclass(frozen=True)
class HostMemoryPlan:
    """Predicted host memory of a node of a run that offloads, in GiB, over all processes of the node.

    Copies of the state for checkpoints are not in it: without room for them, training waits for each checkpoint.

    Attributes:
        parameters: offloaded weights.
        gradients: their gradients.
        optimizer: optimizer states.
        activations: saved for the backward pass of a micro-batch.
        processes: all other memory of the processes.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    processes: float

    @property
    def parts(self) -> dict[str, float]:
        """GiB by part."""
        return dict(vars(self))

    @property
    def total(self) -> float:
        """GiB in total."""
        return sum(self.parts.values())


def predict_host_memory(setup: Setup) -> HostMemoryPlan | None:
    """Predict the host memory of a node; None if nothing is offloaded.

    State that takes less GPU memory because of `offload` is in host memory instead.
    """
    training = setup.training
    if setup.device == "cpu" or (training.offload == "none" and not training.activation_offload):
        return None
    local, whole = Sizes(setup), Sizes(setup.with_training(offload="none"))
    per_node = setup.num_processes // setup.num_nodes
    rounding = _pinned_rounding(setup) if training.offload == "all" and setup.engine == "fsdp2" else 1.0
    return HostMemoryPlan(
        parameters=per_node * rounding * (whole.local_weights() - local.local_weights()) / GIB,
        gradients=per_node * rounding * (whole.local_gradients() - local.local_gradients()) / GIB,
        optimizer=per_node * (whole.local_states() - local.local_states()) / GIB,
        activations=per_node * local.offloaded_activations() / GIB,
        processes=per_node * PROCESS_GIB,
    )


def _pinned_rounding(setup: Setup) -> float:
    """Return the ratio of pinned memory to the matrices in it: torch's allocator rounds each up to a power of two."""
    counts = count_model(setup.shape)
    width = FP32 if setup.training.adapters is None else Sizes(setup).width
    matrices = [(each.count, each.size) for each in counts.linears]
    matrices += [(each.count, each.size) for each in counts.expert_matrices]
    matrices.append((1, setup.shape.vocab_size * setup.shape.hidden_size))
    sizes = [(num, width * size / setup.num_shards) for num, size in matrices]
    pinned: float = sum(num * 2.0 ** ceil(log2(size)) for num, size in sizes)
    return pinned / sum(num * size for num, size in sizes)
