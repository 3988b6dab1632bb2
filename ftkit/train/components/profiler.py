"""torch's profiler around the training loop, on the ranks and for the steps that the recipe names."""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ftkit.errors import TrainingError
from ftkit.files import atomic_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ftkit.config.profiler import ProfileSpec
    from ftkit.planning.layout import RunLayout
    from ftkit.train.world import World

log = logging.getLogger(__name__)

NUM_MEMORY_EVENTS = 500_000
"""Allocations and frees that a snapshot remembers: some hundred MB of main memory at most."""


def check_profile(spec: ProfileSpec, num_steps: int) -> None:
    """Check that a run is long enough, where only the prepared data tells how long it is.

    Raises:
        TrainingError: it is not.
    """
    if spec.enabled and spec.num_steps > num_steps:
        raise TrainingError(
            f"the profile takes {spec.num_steps} steps, the run has {num_steps}",
            fix="take fewer profile.wait_steps, warmup_steps, active_steps or cycles, or a longer run",
        )


@contextmanager
def profiled(spec: ProfileSpec, layout: RunLayout, world: World) -> Iterator[Callable[[], object]]:
    """Give what tells the profiler that a step has ended. A run that is resumed is profiled once."""
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
    """Remember allocations, and write them down at the end, also when that is an out-of-memory error."""
    torch.cuda.memory._record_memory_history(max_entries=NUM_MEMORY_EVENTS, stacks="python")  # noqa: SLF001
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(str(layout.memory_snapshot(world.rank)))  # type: ignore[no-untyped-call]  # noqa: SLF001
        torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001
