"""Observers of the training loop: metrics, hang detection, rank times, evaluations, checkpoints, profiles."""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from statistics import median
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile, schedule

from ftkit.errors import TrainingError, plural
from ftkit.files import atomic_file, write_file, write_json
from ftkit.runs.slow_ranks import MIN_STEPS, RankTiming, find_stragglers, read_timings
from ftkit.train.loop import Observer, Phase, Progress, StepResult
from ftkit.train.private_apis.torch import dump_memory_snapshot, record_memory_history
from ftkit.train.watchdog import Watchdog

if TYPE_CHECKING:
    from torch import nn

    from ftkit.config.recipe import ProfileSpec
    from ftkit.planning.layout import RunLayout
    from ftkit.train.checkpoint.saving import Checkpointer
    from ftkit.train.components.evaluate import Evaluator
    from ftkit.train.components.recorder import Recorder
    from ftkit.train.engine import Engine
    from ftkit.train.memory.usage import MemoryTrace
    from ftkit.train.world import World

log = logging.getLogger(__name__)

_NUM_MEMORY_EVENTS = 500_000  # allocations and frees in a memory snapshot: a few hundred MB of host memory


class HangWatch(Watchdog, Observer):
    """The watchdog, attached to the loop."""


class FirstStep(Observer):
    """Measure memory and time in stages of the first step, and record the current step for errors."""

    _STAGES: ClassVar[dict[Phase, str]] = {
        "forward": "first forward",
        "backward": "first backward",
        "update": "first step",
        "reduce": "training",
    }

    def __init__(self, progress: Progress, trace: MemoryTrace, recorder: Recorder) -> None:
        self._progress = progress
        self._trace = trace
        self._recorder = recorder

    def begin(self, phase: Phase) -> None:
        if phase == "batch":
            self._trace.step = self._progress.step + 1
        else:
            self._trace.begin_once(self._STAGES[phase])

    def report(self, result: StepResult) -> None:
        if result.step != self._progress.first_step:
            return
        record = self._trace.first_step(result.step)
        self._recorder.write(record)
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in record.phases.items())
        log.info("step %d ended %.1f s after the start: %s", record.step, record.seconds, phases)

    def finish(self) -> None:
        self._trace.step = None


class Evaluation(Observer):
    """Evaluates every few steps, and compares the evaluations if the recipe selects the best one."""

    def __init__(self, progress: Progress, engine: Engine, evaluator: Evaluator, recorder: Recorder) -> None:
        self._progress = progress
        self._engine = engine
        self._evaluator = evaluator
        self._recorder = recorder

    def end_step(self) -> None:
        progress = self._progress
        progress.is_best = False
        if not progress.is_evaluation_due:
            return
        own = self._evaluator.evaluate(self._engine, progress.step, "during")
        record = self._evaluator.world.gather_objects(own)[0]  # host sync: once an evaluation
        self._recorder.write(record)
        if (selection := progress.plan.recipe.evaluation.selection) is not None:
            progress.add_evaluation(record, selection)


class Saving(Observer):
    """Saves a checkpoint every few steps, after the best evaluation so far, and at the end."""

    def __init__(self, progress: Progress, engine: Engine, checkpointer: Checkpointer) -> None:
        self._progress = progress
        self._engine = engine
        self._checkpointer = checkpointer

    def end_step(self) -> None:
        progress = self._progress
        if progress.is_over or progress.is_best or progress.is_checkpoint_due:
            self._checkpointer.save(self._engine, progress.state, in_background=not progress.is_over)
        else:
            self._checkpointer.report_ended()


_WINDOW = 100
_WRITE_SECONDS = 60.0  # between two writes of a rank: thousands of ranks may share a file system
Mark = torch.cuda.Event | float


class RankTimes(Observer):
    """Measures the steps of this rank, writes their medians to its file, and reports stragglers on rank 0.

    Marks are recorded when the device begins a decoder layer and ends it. FSDP2 all-gathers a layer's weights in a
    forward pre-hook, so a hook after it leaves out the time that the rank waits for others.
    """

    def __init__(self, progress: Progress, world: World, layers: Iterable[nn.Module]) -> None:
        self._progress = progress
        self._layout = progress.plan.layout
        self._world = world
        self._is_cuda = world.device.type == "cuda"
        self._marks: list[Mark] | None = None  # of the current forward, if it is measured
        self._pending: dict[int, list[Mark]] = {}
        self._steps: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._last_step = 0
        self._num_unwritten = 0
        self._written = time.monotonic()
        self._reported: set[str] = set()
        # If collectives run within layers (ZeRO-3, context parallelism), waiting can't be separated from computation.
        if world.size > 1 and world.context.size == 1:
            for layer in filter(lambda each: isinstance(each, FSDPModule), layers):
                layer.register_forward_pre_hook(self._mark)
                layer.register_forward_hook(self._mark, prepend=True)
        old = [self._layout.rank_timing(world.rank)]  # files of earlier starts
        if world.is_first:
            old = [*self._layout.logs.glob("timing-*.json"), self._layout.stragglers]
        with suppress(OSError):
            for path in old:
                path.unlink(missing_ok=True)

    def _mark(self, *_: object) -> None:
        if self._marks is None:
            return
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def begin(self, phase: Phase) -> None:
        step = self._progress.step + 1
        if phase == "forward" and step not in self._pending:
            self._marks = self._pending[step] = []
        else:
            self._marks = None

    def report(self, result: StepResult) -> None:
        marks = self._pending.pop(result.step, None)
        if not marks:
            return
        computing = sum(map(_seconds_between, marks[::2], marks[1::2]))
        self._steps.append((result.timing.seconds, computing))
        self._last_step = result.step
        self._num_unwritten += 1

    def end_step(self) -> None:
        is_due = self._num_unwritten >= MIN_STEPS and time.monotonic() - self._written > _WRITE_SECONDS
        if not self._num_unwritten or not (is_due or self._progress.is_over):
            return
        self._written, self._num_unwritten = time.monotonic(), 0
        medians = (median(values) for values in zip(*self._steps, strict=True))
        rank, host, device = self._world.rank, socket.gethostname(), self._world.device.type
        timing = RankTiming(rank, host, device, self._last_step, len(self._steps), *map(float, medians))
        with suppress(OSError):
            write_json(self._layout.rank_timing(rank), timing)
            if is_due and self._world.is_first:
                self.report_stragglers()

    def finish(self) -> None:
        if self._world.is_first:  # the last save waited for all ranks, so all have written their times
            self.report_stragglers()

    def report_stragglers(self) -> None:
        found = find_stragglers(read_timings(self._layout))
        for each in found:
            if each.host not in self._reported:
                log.warning("%s", each)
                self._reported.add(each.host)
        if self._progress.plan.recipe.resources.exclude_stragglers:
            with suppress(OSError):
                lines = [f"{each.host}\t{each.reason}\n" for each in found[:1]]
                write_file(self._layout.stragglers, "".join(lines).encode())


def _seconds_between(first: Mark, second: Mark) -> float:
    if isinstance(first, torch.cuda.Event) and isinstance(second, torch.cuda.Event):
        return float(first.elapsed_time(second)) / 1000
    return cast("float", second) - cast("float", first)


def check_profile(spec: ProfileSpec, num_steps: int) -> None:
    """Check that the run has enough steps for the profile; their number is known once the data is prepared."""
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
            record_memory_history(_NUM_MEMORY_EVENTS)
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
