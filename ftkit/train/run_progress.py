"""Where a run stands: its state, what is due after a step, and its best evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from ftkit.errors import DataError, TrainingError
from ftkit.planning.plan import RunPlan
from ftkit.runs.checkpoints import BestEvaluation, TrainState
from ftkit.train.components.batches import BatchSchedule

if TYPE_CHECKING:
    from ftkit.config.recipe import BestSpec
    from ftkit.runs.records import EvaluationRecord
    from ftkit.train.components.batches import StepBatch


@dataclass
class Progress:
    """The steps of a run. The loop advances it; observers read it, and set whether training stops."""

    plan: RunPlan
    batches: BatchSchedule
    state: TrainState  # after the last step that the host has queued
    num_steps: int  # of the run, those before its newest checkpoint included
    is_stopped: bool = False  # a stop was requested, on all ranks after the same step
    is_best: bool = False  # the evaluation after the last step is the best one so far

    def __post_init__(self) -> None:
        self.first_step = self.state.step + 1

    @classmethod
    def resume(cls, plan: RunPlan, batches: BatchSchedule, state: TrainState) -> Self:
        """Continue from a checkpoint's state, or begin.

        A best evaluation by a metric that the run no longer compares is forgotten.

        Raises:
            TrainingError: the run is planned to end before its newest checkpoint.
        """
        max_steps, criterion = plan.recipe.training.max_steps, plan.recipe.evaluation.selection
        num_steps = (batches.count_steps() or 0) if max_steps is None else max_steps
        if state.step > num_steps:
            key = "num_epochs" if max_steps is None else "max_steps"
            raise TrainingError(
                f"the newest checkpoint is of step {state.step}, and the run is planned to end after step {num_steps}",
                meaning=f"training.{key} was lowered below what is trained already",
                fix=f"raise it to continue: ftkit resume {plan.id} training.{key}=N; "
                f"or use the checkpoint as it is: ftkit export {plan.id}",
            )
        if criterion is None or (state.best is not None and state.best.metric != criterion.metric):
            state = replace(state, best=None, evaluations_without_improvement=0)
        return cls(plan, batches, state, num_steps)

    def advance(self, batch: StepBatch) -> None:
        """Count one more step."""
        step = self.state.step + 1
        self.state = replace(
            self.state,
            step=step,
            num_packs=self.batches.num_packs_before(step),
            num_tokens=self.state.num_tokens + batch.num_tokens,
            num_targets=self.state.num_targets + batch.num_targets,
        )

    @property
    def step(self) -> int:
        """Number of steps so far, those before the newest checkpoint included."""
        return self.state.step

    @property
    def is_stopped_early(self) -> bool:
        """Whether the recipe's patience is exhausted by consecutive evaluations without improvement."""
        patience = self.plan.recipe.evaluation.early_stopping_patience
        return patience is not None and self.state.evaluations_without_improvement >= patience

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done."""
        return self.step == self.num_steps or self.is_stopped_early

    @property
    def is_over(self) -> bool:
        """Whether no step follows."""
        return self.is_stopped or self.is_complete

    @property
    def outcome(self) -> Literal["completed", "stopped"]:
        """How training ended."""
        return "completed" if self.is_complete else "stopped"

    @property
    def is_evaluation_due(self) -> bool:
        """Whether an evaluation follows this step."""
        evaluation = self.plan.recipe.evaluation
        if evaluation.every_steps is None:
            return False
        if self.step == self.num_steps:  # the full evaluation follows after training
            return evaluation.selection is not None
        return self.step % evaluation.every_steps == 0

    @property
    def is_checkpoint_due(self) -> bool:
        """Whether a checkpoint follows this step in any case."""
        return self.step % self.plan.recipe.training.checkpoint_every_steps == 0

    @property
    def has_host_sync(self) -> bool:
        """Whether the host waits for the device after this step anyway, so that the step can be reported first."""
        is_end = self.step in {self.first_step, self.num_steps}
        return is_end or self.is_stopped or self.is_evaluation_due or self.is_checkpoint_due

    def add_evaluation(self, record: EvaluationRecord, criterion: BestSpec) -> None:
        """Compare an evaluation with the best one so far, and count those without improvement.

        As in transformers: any better value becomes the best one, but one that is better by at most the threshold does
        not count as an improvement. A value that is not finite is never better.

        Raises:
            DataError: the evaluation did not measure the metric.
        """
        check_is_measured(record, criterion)
        state, threshold = self.state, self.plan.recipe.evaluation.early_stopping_threshold
        value, gain = record.value_of(criterion.metric), math.inf
        if state.best is not None:
            gain = (state.best.value - value) * (1 if criterion.is_lower_better else -1)
        if not math.isfinite(value) or gain <= 0:
            gain = 0.0
        self.is_best = gain > 0
        self.state = replace(
            state,
            best=BestEvaluation(record.step, criterion.metric, value) if gain else state.best,
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
