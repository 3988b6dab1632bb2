"""Compare the host memory that a run is predicted to need with the memory of its nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ftkit.errors import MemoryExhaustedError
from ftkit.planning.suggestions import suggest_less_host_memory

if TYPE_CHECKING:
    from ftkit.planning.plan import RunPlan

CERTAINLY_TOO_LARGE: Final = 2.0
"""A run is refused if its predicted memory exceeds this multiple of the available memory."""


def check_host_memory(plan: RunPlan, node_gib: float | None, owner: str) -> list[str]:
    """Check that a node has room for what the run offloads.

    Args:
        plan: the plan, with its predicted host memory.
        node_gib: memory of the node, in GiB; None if unknown.
        owner: description of the node, for messages.

    Returns:
        A warning if it probably has no room.

    Raises:
        MemoryExhaustedError: it has less than half of the predicted memory.
    """
    memory = plan.host_memory
    if memory is None or node_gib is None or memory.total <= node_gib:
        return []
    training = plan.recipe.training
    keys = ["training.activation_offload"] if training.activation_offload else []
    keys += [f"training.offload={training.offload}"] if training.offload != "none" else []
    what = (
        f"with {' and '.join(keys)}, the run is predicted to need about {memory.total:,.0f} GiB of host memory per "
        f"node, {owner} has {node_gib:,.0f} GiB"
    )
    fitting = suggest_less_host_memory(plan.setup, plan.cluster, node_gib)
    fix = f"would fit: {'; '.join(fitting)}" if fitting else "use nodes with more memory, or a shorter sequence_length"
    if memory.total > CERTAINLY_TOO_LARGE * node_gib:
        raise MemoryExhaustedError(what, meaning="the kernel would end the job's processes without a message", fix=fix)
    return [f"{what}: the kernel may end the job's processes without a message; {fix}"]
