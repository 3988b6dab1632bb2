"""Does a run fit: the memory of a process and of a node, compared with what they have. The front is `fit`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log2
from typing import Final

from ftkit.config.execution import FP32, GIB
from ftkit.models.parameters import count_model
from ftkit.planning.fit.memory import CPU_LIBRARIES_GIB, MemoryPlan, tensors_of
from ftkit.planning.training_setup import Setup

PROCESS_GIB: Final = 4.0  # host memory of a process without offloaded tensors: torch, CUDA and NCCL. Assumed.


@dataclass(frozen=True)
class HostMemoryPlan:
    """Predicted host memory of a node of a run that offloads, in GiB, over all processes of the node.

    `processes` is their memory besides offloaded tensors. Copies of the state for checkpoints are not in it: without
    room for them, training waits for each checkpoint.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    processes: float

    @property
    def parts(self) -> dict[str, float]:
        return dict(vars(self))

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Fit:
    """Predicted memory of a setup; each prediction is made once, when it is first asked for."""

    setup: Setup

    @cached_property
    def memory(self) -> MemoryPlan:
        """Peak memory of a process: the maximum over loading and four points of a step."""
        highest = max(tensors_of(self.setup).moments(), key=lambda moment: moment.total)
        return replace(highest, libraries=CPU_LIBRARIES_GIB) if self.setup.device == "cpu" else highest

    @cached_property
    def host_memory(self) -> HostMemoryPlan | None:
        """Host memory of a node; None if nothing is offloaded.

        State that takes less GPU memory because of `offload` is in host memory instead.
        """
        setup, training = self.setup, self.setup.training
        if setup.device == "cpu" or (training.offload == "none" and not training.activation_offload):
            return None
        local, whole = tensors_of(setup), tensors_of(setup.with_training(offload="none"))
        per_node = setup.num_processes // setup.num_nodes
        rounding = _pinned_rounding(setup) if training.offload == "all" and setup.engine == "fsdp2" else 1.0
        return HostMemoryPlan(
            parameters=per_node * rounding * (whole.weights - local.weights) / GIB,
            gradients=per_node * rounding * (whole.gradients - local.gradients) / GIB,
            optimizer=per_node * (whole.states - local.states) / GIB,
            activations=per_node * local.activations.offloaded / GIB,
            processes=per_node * PROCESS_GIB,
        )

    def on_gpu(self, room_gib: float) -> bool:
        """Return whether a process fits into this memory."""
        return self.memory.total <= room_gib

    def on_host(self, room_gib: float) -> bool:
        """Return whether the processes of a node fit into this host memory."""
        return self.host_memory is None or self.host_memory.total <= room_gib


def fit(setup: Setup) -> Fit:
    """Predict whether a setup fits."""
    return Fit(setup)


def _pinned_rounding(setup: Setup) -> float:
    """Return the ratio of pinned memory to the matrices in it: torch's allocator rounds each up to a power of two."""
    counts = count_model(setup.shape)
    width = FP32 if setup.training.adapters is None else setup.training.compute_bytes
    matrices = [(each.count, each.size) for each in counts.linears]
    matrices += [(each.count, each.size) for each in counts.expert_matrices]
    matrices.append((1, setup.shape.vocab_size * setup.shape.hidden_size))
    sizes = [(num, width * size / setup.num_shards) for num, size in matrices]
    pinned: float = sum(num * 2.0 ** ceil(log2(size)) for num, size in sizes)
    return pinned / sum(num * size for num, size in sizes)
