"""The training loop."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from ftkit.errors import DataError, TrainingError
from ftkit.planning.plan import RunPlan
from ftkit.runs.checkpoints import BestEvaluation, TrainState
from ftkit.train.causal_lm import SourceLosses
from ftkit.train.checkpoint.saving import Checkpointer
from ftkit.train.components.anomalies import AnomalyWatch
from ftkit.train.components.batches import BatchSchedule, StepBatch, prefetched
from ftkit.train.components.evaluate import Evaluator
from ftkit.train.components.metrics import Recorder, StepOutcome, StepReducer, StepReporter, StepResult, Stopwatch
from ftkit.train.components.mfu import MfuMeter
from ftkit.train.components.optimizer import learning_rate_at
from ftkit.train.components.profiler import profiled
from ftkit.train.components.rank_times import RankTimes
from ftkit.train.components.watchdog import Watchdog, watched
from ftkit.train.engine import Engine
from ftkit.train.memory.trace import MemoryTrace
from ftkit.train.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from ftkit.config.evaluation import BestSpec
    from ftkit.planning.layout import RunLayout
    from ftkit.runs.records import EvaluationRecord


log = logging.getLogger(__name__)

Outcome = Literal["completed", "stopped"]


@dataclass(kw_only=True)
class TrainingLoop:
    """Runs the optimizer steps of a run. What changes from step to step is in `engine` and `state`."""

    plan: RunPlan
    world: World
    engine: Engine
    batches: BatchSchedule
    evaluator: Evaluator
    recorder: Recorder
    trace: MemoryTrace
    mfu_meter: MfuMeter
    checkpointer: Checkpointer
    num_steps: int
    state: TrainState
    anomalies: AnomalyWatch
    rank_times: RankTimes
    sources: tuple[str, ...] = ()
    """Names of the sources of a mixture, whose losses are also reported separately."""

    def train(self) -> Outcome:
        """Train until the last step, early stopping or a stop request; always end with a checkpoint."""
        reporter = StepReporter(self.recorder, self.trace, self.mfu_meter, self.num_steps, self.state)
        stopwatch, reducer = Stopwatch(), StepReducer(self.sources)
        stopped = False
        first_step = self.state.step + 1
        steps = range(self.state.step, self.num_steps)
        with (
            self._reporting_to_the_end(reporter, reducer),
            prefetched(self.batches.step, steps, self.world.device) as batches,
            profiled(self.plan.recipe.profile, self.plan.layout, self.world) as end_profiled_step,
            self._watched(stopwatch) as watchdog,
        ):
            while not self.is_complete and not stopped:
                self.trace.begin_step(self.state.step + 1)
                watchdog.begin(self.state.step + 1)
                with stopwatch.waiting():
                    batch = next(batches)
                with stopwatch.work():
                    outcome = self._train_step(batch)
                    previous = reducer.pop()  # host sync: on the previous step, while the device computes this one
                self.state = self._next_state(batch)
                stop = self._is_stop_requested()
                reducer.push(self.state.step, batch, outcome, stopwatch.take(), stop=stop)
                stopped = self._report_and_check(reporter, previous)
                watchdog.end()
                if stopped or self._syncs_with_step() or self.state.step == first_step:
                    stopped |= self._report_and_check(reporter, reducer.pop())
                with stopwatch.paused():
                    if self.state.step == first_step:
                        self._report_start(first_step)
                    is_best = self._evaluate_if_due()
                    is_last = stopped or self.is_complete
                    self.rank_times.write_if_due(is_last=is_last)
                    self._save_if_due(is_best=is_best, is_last=is_last)
                    end_profiled_step()
        self.trace.begin_step(None)
        if self.world.is_first:  # the last save waited for all ranks, so all have written their times
            self.rank_times.report_stragglers()
        return "completed" if self.is_complete else "stopped"

    def _next_state(self, batch: StepBatch) -> TrainState:
        """Return the state after one more step."""
        step = self.state.step + 1
        return replace(
            self.state,
            step=step,
            num_packs=self.batches.num_packs_before(step),
            num_tokens=self.state.num_tokens + batch.num_tokens,
            num_targets=self.state.num_targets + batch.num_targets,
        )

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done."""
        return self.state.step == self.num_steps or self.is_stopped_early

    @property
    def is_stopped_early(self) -> bool:
        """Whether the recipe's patience is exhausted by consecutive evaluations without improvement."""
        patience = self.plan.recipe.evaluation.early_stopping_patience
        return patience is not None and self.state.evaluations_without_improvement >= patience

    def _watched(self, stopwatch: Stopwatch) -> AbstractContextManager[Watchdog]:
        floor = self.plan.recipe.resources.hang_timeout_seconds
        return watched(self.plan.layout, self.world, floor, lambda: stopwatch.waits_for_batch)

    @contextmanager
    def _reporting_to_the_end(self, reporter: StepReporter, reducer: StepReducer) -> Iterator[None]:
        """Report the last step even if the run fails, unless the device might never finish it."""
        try:
            yield
        finally:
            if reducer.is_done:
                self._report(reporter, reducer.pop())

    def _syncs_with_step(self) -> bool:
        """Return whether the host waits for this step anyway, so that it can be reported first."""
        return (
            self.world.device.type == "cpu"
            or self.state.step == self.num_steps
            or self._is_evaluation_due()
            or self._is_checkpoint_due()
        )

    def _train_step(self, batch: StepBatch) -> StepOutcome:
        """Run forward and backward on each micro-batch, then take one optimizer step."""
        training = self.plan.recipe.training
        torch.manual_seed(self._seed_of_step())
        last = len(batch.micro_batches) - 1
        losses = []
        source_losses = SourceLosses(len(self.sources), self.world.device)
        for index, micro_batch in enumerate(batch.micro_batches):
            self.trace.begin_once("first forward")
            with self.rank_times.measuring(self.state.step + 1) if index == 0 else nullcontext():
                loss = self.engine.forward(micro_batch, source_losses)
            self.trace.begin_once("first backward")
            self.engine.backward(loss, batch.num_targets, is_last=index == last)
            self.trace.begin_once("first step")
            losses.append(loss.detach())
            del loss  # and its graph
        learning_rate = learning_rate_at(self.state.step, self.num_steps, training)
        grad_norm = self.engine.step(learning_rate, training.max_grad_norm)
        self.trace.begin_once("training")
        router_sums = self.engine.model.routers.take()
        return StepOutcome(torch.stack(losses).sum(), source_losses, router_sums, grad_norm, learning_rate)

    def _seed_of_step(self) -> int:
        """Return the seed of what a model's own class draws; adapters' dropout has its own (`Dropout`).

        Equal when a step is repeated after a resume, and on ranks that divide layers.
        """
        text = f"{self.plan.recipe.training.seed} {self.state.step} {self.world.rank // self.world.tensor_parallel}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")

    def _is_stop_requested(self) -> bool:
        """Check for a stop request on rank 0; the step's all-reduce passes it to the others."""
        return self.world.is_first and any(map(_exists, _stop_files(self.plan.layout)))

    def _report_and_check(self, reporter: StepReporter, result: StepResult | None) -> bool:
        """Report a step, and check it for anomalies; return whether a stop was requested."""
        stopped = self._report(reporter, result)
        if result is not None:
            self.rank_times.count(result)
            self.anomalies.check(result)
        return stopped

    def _report(self, reporter: StepReporter, result: StepResult | None) -> bool:
        """Report a step, if there is one; return whether a stop was requested."""
        if result is None:
            return False
        reporter.count(result)
        every = self.plan.recipe.training.log_every_steps
        if result.step % every == 0 or result.step in {1, self.num_steps} or result.stop_requested:
            reporter.report(result, self.batches.epoch_of_step(result.step))
        return result.stop_requested

    def _report_start(self, first_step: int) -> None:
        record = self.trace.first_step(first_step)
        self.recorder.write(record)
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in record.phases.items())
        log.info("step %d ended %.1f s after the start: %s", record.step, record.seconds, phases)

    def _is_evaluation_due(self) -> bool:
        evaluation, step = self.plan.recipe.evaluation, self.state.step
        if evaluation.every_steps is None:
            return False
        if step == self.num_steps:  # the full evaluation follows after training
            return evaluation.selection is not None
        return step % evaluation.every_steps == 0

    def _evaluate_if_due(self) -> bool:
        """Evaluate if it is due; return whether it is the best evaluation so far, the same on all ranks."""
        if not self._is_evaluation_due():
            return False
        record = self.evaluator.evaluate(self.engine, self.state.step, "during")
        self.recorder.write(record)
        evaluation = self.plan.recipe.evaluation
        if evaluation.selection is None:
            return False
        state = with_evaluation(self.state, record, evaluation.selection, evaluation.early_stopping_threshold)
        self.state = self.world.gather_objects(state)[0]  # host sync: once an evaluation
        return self.state.best is not None and self.state.best.step == self.state.step

    def _is_checkpoint_due(self) -> bool:
        return self.state.step % self.plan.recipe.training.checkpoint_every_steps == 0

    def _save_if_due(self, *, is_best: bool, is_last: bool) -> None:
        if is_best or is_last or self._is_checkpoint_due():
            self.checkpointer.save(self.engine, self.state, in_background=not is_last)
        else:
            self.checkpointer.report_ended()


def last_step(plan: RunPlan, batches: BatchSchedule, state: TrainState) -> int:
    """Return the number of steps of a run, those before its newest checkpoint included.

    Raises:
        TrainingError: the run is planned to end before its newest checkpoint.
    """
    max_steps = plan.recipe.training.max_steps
    step = (batches.count_steps() or 0) if max_steps is None else max_steps
    if state.step > step:
        key = "num_epochs" if max_steps is None else "max_steps"
        raise TrainingError(
            f"the newest checkpoint is of step {state.step}, and the run is planned to end after step {step}",
            meaning=f"training.{key} was lowered below what is trained already",
            fix=f"raise it to continue: ftkit resume {plan.id} training.{key}=N; "
            f"or use the checkpoint as it is: ftkit export {plan.id}",
        )
    return step


def by_criterion(state: TrainState, criterion: BestSpec | None) -> TrainState:
    """Return a checkpoint's state without the best evaluation by a metric that the run no longer compares."""
    if criterion is not None and (state.best is None or state.best.metric == criterion.metric):
        return state
    return replace(state, best=None, evaluations_without_improvement=0)


def with_evaluation(state: TrainState, record: EvaluationRecord, criterion: BestSpec, threshold: float) -> TrainState:
    """Return the state after an evaluation: the best one so far, and the number of them without improvement.

    As in transformers: any better value becomes the best one, but one that is better by at most `threshold` does not
    count as an improvement. A value that is not finite is never better.

    Raises:
        DataError: the evaluation did not measure the metric.
    """
    check_is_measured(record, criterion)
    value, best = record.value_of(criterion.metric), state.best
    if best is not None and best.metric != criterion.metric:  # the run was resumed with another metric
        best = None
    gain = math.inf if best is None else (best.value - value) * (1 if criterion.is_lower_better else -1)
    if not math.isfinite(value) or gain <= 0:
        gain = 0.0
    return replace(
        state,
        best=BestEvaluation(record.step, criterion.metric, value) if gain else best,
        evaluations_without_improvement=0 if gain > threshold else state.evaluations_without_improvement + 1,
    )


def check_is_measured(record: EvaluationRecord | None, criterion: BestSpec | None) -> None:
    """Check that an evaluation measured the metric that selects the best one: it would never be found.

    Raises:
        DataError: no row that was evaluated has a score.
    """
    if record is None or criterion is None or record.measures(criterion.metric):
        return
    raise DataError(
        f"evaluation.best.metric '{criterion.metric}' was not measured",
        meaning="no row of the validation split that was evaluated has a score, such as tool calls for 'calls'",
        fix=f"choose one that was: {', '.join(['loss', 'perplexity', *record.scores])}",
    )


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except OSError:  # the file system may also be unreachable for a while
        return False
    return True


def _stop_files(layout: RunLayout) -> list[Path]:
    """Return the files that request a stop: one for the run, and one for this Slurm job."""
    job_file = os.environ.get("FTKIT_STOP_FILE")
    return [layout.stop_request, *([Path(job_file)] if job_file else [])]
