"""The resources that a recipe requests."""

from typing import Annotated

from pydantic import Field

from ftkit.spec import WHOLE_NUMBER, PositiveInt, Spec, TimeLimit


class ResourcesSpec(Spec):
    """Resources that the recipe requests; options of `ftkit run` take precedence."""

    num_nodes: Annotated[int, Field(gt=0, le=2**16), WHOLE_NUMBER] = 1
    """Number of nodes."""
    gpus_per_node: PositiveInt | None = None
    """GPUs per node, one process each. All of the node's if null."""
    spare_nodes: Annotated[int, Field(ge=0, le=2**10), WHOLE_NUMBER] = 0
    """Additional nodes of the job that don't train, on Slurm. One of them replaces a node that no longer answers,
    within the job; without one, the job is requeued."""
    max_restarts: Annotated[int, Field(ge=0, le=1000), WHOLE_NUMBER] = 3
    """Maximum consecutive restarts within a job, from the newest checkpoint, after a process died or failed for a
    possibly transient reason; a new checkpoint resets the count. 0: never."""
    hang_timeout_seconds: PositiveInt = 600
    """A step that takes longer than this, and longer than ten times the median of the last steps, counts as a hang: all
    ranks write their Python stacks and last collectives to `logs/`, and training restarts."""
    exclude_stragglers: bool = False
    """Exclude the slowest node when the job is requeued, if it computes at least 10% more slowly than the others
    (`ftkit status`), on Slurm with two or more nodes. The cluster must have another node to replace it."""
    preflight: bool | None = None
    """Check all nodes before training, on Slurm, and exclude unhealthy ones. If null: with GPUs on two or more
    nodes."""
    time_limit: TimeLimit | None = None
    """Time limit in Slurm's format: `minutes`, `hours:minutes:seconds` or `days-hours:minutes:seconds`; `4:00` is four
    minutes, as in Slurm. The profile's if null."""
