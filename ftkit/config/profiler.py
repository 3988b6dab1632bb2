"""When to look closely at where the time and the memory of a run go."""

from __future__ import annotations

from pydantic import Field

from ftkit.config.strict import NonNegativeInt, PositiveInt, Spec


class ProfileSpec(Spec):
    """torch's profiler over a few steps. It waits, warms up and records, so many times over."""

    enabled: bool = False
    """Record a trace, and on GPUs a snapshot of the memory."""
    wait_steps: NonNegativeInt = 5
    """Steps at the beginning of each cycle that are left alone: the first ones compile kernels."""
    warmup_steps: NonNegativeInt = 3
    """Steps after them that run under the profiler and are thrown away."""
    active_steps: PositiveInt = 20
    """Steps after them that are recorded."""
    cycles: PositiveInt = 1
    """How often; each cycle writes a trace."""
    ranks: tuple[NonNegativeInt, ...] = Field(default=(0,), min_length=1)
    """Ranks that are recorded."""
    with_stack: bool = False
    """Record where in the source each operation comes from: larger traces, slower steps."""
    record_shapes: bool = False
    """Record the shapes of the operations' inputs."""
    memory: bool = True
    """Record what is allocated and freed; on GPUs, write a snapshot with its history as well."""

    @property
    def num_steps(self) -> int:
        """Steps from the beginning to the last that is recorded."""
        return self.cycles * (self.wait_steps + self.warmup_steps + self.active_steps)
