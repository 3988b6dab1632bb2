"""Profile the training loop with torch.profiler, on the ranks and steps that the recipe sets."""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING

from torch.profiler import ProfilerActivity, profile, schedule

from ftkit.errors import TrainingError, plural
from ftkit.files import atomic_file
from ftkit.train.private_apis.torch import dump_memory_snapshot, record_memory_history

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ftkit.config.recipe import ProfileSpec
    from ftkit.planning.layout import RunLayout
    from ftkit.train.world import World

log = logging.getLogger(__name__)

NUM_MEMORY_EVENTS = 500_000
"""Maximum number of allocations and frees in a memory snapshot: a few hundred MB of host memory."""


def check_profile(spec: ProfileSpec, num_steps: int) -> None:
    """Check that the run has enough steps for the profile: its length is known once the data is prepared.

    Raises:
        TrainingError: the run is too short.
    """
    if spec.enabled and spec.num_steps > num_steps:
        raise TrainingError(
            f"the profile takes {plural(spec.num_steps, 'step')}, the run has {num_steps}",
            fix="lower profile.wait_steps, warmup_steps, active_steps or cycles, or train for more steps",
        )


@contextmanager
def profiled(spec: ProfileSpec, layout: RunLayout, world: World) -> Iterator[Callable[[], object]]:
    """Yield a function to call at the end of each step. A resumed run is not profiled again."""
    is_done = layout.profile_trace(world.rank, spec.cycles - 1).exists()
    if not spec.enabled or world.rank not in spec.ranks or is_done:
        yield lambda: None
        return
    layout.profile.mkdir(parents=True, exist_ok=True)
    cycles, memory = count(), ExitStack()

    def write_trace(profiler: profile) -> None:
        cycle = next(cycles)
        path = layout.profile_trace(world.rank, cycle)
        with atomic_file(path) as temporary:
            profiler.export_chrome_trace(str(temporary))
        log.info("profile written to %s", path)
        if cycle + 1 == spec.cycles:
            memory.close()

    with memory:
        if spec.memory and world.device.type == "cuda":
            memory.enter_context(_memory_history(layout, world))
        with profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if world.device.type == "cuda" else [])],
            schedule=schedule(
                wait=spec.wait_steps, warmup=spec.warmup_steps, active=spec.active_steps, repeat=spec.cycles
            ),
            on_trace_ready=write_trace,
            record_shapes=spec.record_shapes,
            profile_memory=spec.memory,
            with_stack=spec.with_stack,
        ) as profiler:
            yield profiler.step


@contextmanager
def _memory_history(layout: RunLayout, world: World) -> Iterator[None]:
    """Record allocations, and write the snapshot at the end, after an out-of-memory error too."""
    record_memory_history(NUM_MEMORY_EVENTS)
    try:
        yield
    finally:
        dump_memory_snapshot(layout.memory_snapshot(world.rank))
        record_memory_history(0)
