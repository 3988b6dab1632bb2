"""Profile the training loop with torch.profiler, on the ranks and steps that the recipe sets."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch.profiler import ProfilerActivity, profile, schedule

from ftkit.errors import TrainingError, plural
from ftkit.files import atomic_file
from ftkit.train.loop import Observer
from ftkit.train.private_apis.torch import dump_memory_snapshot, record_memory_history

if TYPE_CHECKING:
    from ftkit.config.recipe import ProfileSpec
    from ftkit.planning.layout import RunLayout
    from ftkit.train.world import World

log = logging.getLogger(__name__)

NUM_MEMORY_EVENTS = 500_000
"""Maximum number of allocations and frees in a memory snapshot: a few hundred MB of host memory."""


def check_profile(spec: ProfileSpec, num_steps: int) -> None:
    """Check that the run has enough steps for the profile: its length is known once the data is prepared."""
    if spec.enabled and spec.num_steps > num_steps:
        raise TrainingError(
            f"the profile takes {plural(spec.num_steps, 'step')}, the run has {num_steps}",
            fix="lower profile.wait_steps, warmup_steps, active_steps or cycles, or train for more steps",
        )


class Profiler(Observer):
    """Profiles steps on some ranks. A resumed run is not profiled again."""

    def __init__(self, spec: ProfileSpec, layout: RunLayout, world: World) -> None:
        self._spec = spec
        self._layout = layout
        self._world = world
        self._num_traces = 0
        self._profile: profile | None = None
        self._memory = ExitStack()

    def start(self) -> None:
        spec, layout, rank = self._spec, self._layout, self._world.rank
        if not spec.enabled or rank not in spec.ranks or layout.profile_trace(rank, spec.cycles - 1).exists():
            return
        layout.profile.mkdir(parents=True, exist_ok=True)
        is_cuda = self._world.device.type == "cuda"
        if spec.memory and is_cuda:
            record_memory_history(NUM_MEMORY_EVENTS)
            self._memory.callback(record_memory_history, 0)
            self._memory.callback(dump_memory_snapshot, layout.memory_snapshot(rank))  # also after an error
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])],
            schedule=schedule(
                wait=spec.wait_steps, warmup=spec.warmup_steps, active=spec.active_steps, repeat=spec.cycles
            ),
            on_trace_ready=self._write_trace,
            record_shapes=spec.record_shapes,
            profile_memory=spec.memory,
            with_stack=spec.with_stack,
        )
        self._profile.start()

    def end_step(self) -> None:
        if self._profile is not None:
            self._profile.step()

    def close(self) -> None:
        with self._memory:
            if self._profile is not None:
                self._profile.stop()

    def _write_trace(self, profiler: profile) -> None:
        path = self._layout.profile_trace(self._world.rank, self._num_traces)
        with atomic_file(path) as temporary:
            profiler.export_chrome_trace(str(temporary))
        log.info("profile written to %s", path)
        self._num_traces += 1
        if self._num_traces == self._spec.cycles:
            self._memory.close()
