"""What is attached to the training loop: metrics, hang detection, evaluations, checkpoints, profiles."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar

from ftkit.train.loop import Observer, Observers
from ftkit.train.model.hf_model import find_decoder_layers
from ftkit.train.observers.profiler import Profiler
from ftkit.train.observers.ranks import RankTimes, Watchdog
from ftkit.train.observers.step_metrics import AnomalyWatch, StepMetrics, Stopwatch

if TYPE_CHECKING:
    from ftkit.train.checkpoint.saving import Checkpointer
    from ftkit.train.components.evaluate import Evaluator
    from ftkit.train.components.recorder import Recorder
    from ftkit.train.engine import Engine
    from ftkit.train.loop import Phase, Progress, StepResult
    from ftkit.train.memory.usage import MemoryTrace

log = logging.getLogger(__name__)


def make_observers(  # noqa: PLR0913 - what they read and write
    progress: Progress,
    engine: Engine,
    *,
    evaluator: Evaluator,
    checkpointer: Checkpointer,
    recorder: Recorder,
    trace: MemoryTrace,
    sources: tuple[str, ...],
) -> Observers:
    """Return what is attached to a run's training loop, in the order in which it is called.

    `sources` are the names of the sources of a mixture, whose losses are also reported separately.
    """
    plan, world = progress.plan, evaluator.world
    stopwatch = Stopwatch()
    return Observers(
        [
            StepMetrics(
                progress, world, stopwatch, recorder, trace, sources
            ),  # reduces over the ranks, one step behind
            FirstStep(progress, trace, recorder),
            AnomalyWatch(plan.id, plan.recipe.training.on_nonfinite, recorder, progress.batches.packs_of_step),
            Watchdog(plan.layout, world, progress, plan.recipe.resources.hang_timeout_seconds),
            stopwatch,  # what follows takes long, and counts neither as a hang nor as a step's time
            Evaluation(progress, engine, evaluator, recorder),  # may end training, and selects the best checkpoint
            # Writes its file before the last save, in which all ranks wait for each other.
            RankTimes(progress, world, find_decoder_layers(engine.model.hf_model)),
            Saving(progress, engine, checkpointer),
            Profiler(plan.recipe.profile, plan.layout, world),
        ]
    )


class FirstStep(Observer):
    """Divides the first step into stages of the run's memory and time, and records the current step for errors."""

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
