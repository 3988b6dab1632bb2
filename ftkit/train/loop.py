"""The training loop, the progress of a run, and the interface to observers of the loop."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Literal, Self

import torch

from ftkit.errors import DataError, TrainingError
from ftkit.planning.plan import RunPlan
from ftkit.runs.checkpoints import BestEvaluation, TrainState
from ftkit.runs.records import EvaluationRecord, RouterStats, SourceLoss
from ftkit.train.causal_lm import SourceLosses
from ftkit.train.components.batches import BatchSchedule, StepBatch, prefetched
from ftkit.train.components.optimizer import learning_rate_at
from ftkit.train.components.references import reference_point
from ftkit.train.model.routers import RouterSums

if TYPE_CHECKING:
    from ftkit.config.recipe import BestSpec
    from ftkit.train.engine import Engine
    from ftkit.train.world import World


def train(world: World, engine: Engine, progress: Progress, observers: Observers, num_sources: int = 0) -> None:
    """Train until the last step, early stopping or a stop request."""
    device, training = world.device, progress.plan.recipe.training
    steps = range(progress.step, progress.num_steps)
    with observers.attached(), prefetched(progress.batches.step, steps, device) as batches:
        while not progress.is_over:
            observers.begin("batch")
            batch = next(batches)
            torch.manual_seed(_seed_of_step(training.seed, progress.step, world))
            losses, source_losses = [], SourceLosses(num_sources, device, len(training.metric_names))
            kl_bits = None
            if batch.mismatched:
                observers.begin("forward")
                with engine.inference() as model:
                    kl_bits = reference_point(model, batch.mismatched)
            for number, micro_batch in enumerate(batch.micro_batches, start=1):
                observers.begin("forward")
                loss = engine.forward(replace(micro_batch, kl_bits=kl_bits), source_losses)
                observers.begin("backward")
                engine.backward(loss, batch.num_samples, is_last=number == len(batch.micro_batches))
                losses.append(loss.detach())
                del loss  # frees its graph
            observers.begin("update")
            learning_rate = learning_rate_at(progress.step, progress.num_steps, training)
            grad_norm = engine.step(learning_rate, training.max_grad_norm)  # clips the gradient first
            router_sums = engine.model.routers.take()
            progress.advance(batch)
            total = torch.stack(losses).sum()
            observers.end_step(StepOutcome(batch, total, source_losses, router_sums, grad_norm, learning_rate))


def _seed_of_step(seed: int, step: int, world: World) -> int:
    """Return a seed for the model's own class: the same if a step is repeated, and on ranks that divide layers."""
    text = f"{seed} {step} {world.rank // world.tensor_parallel}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


@dataclass
class Progress:
    """The progress of a run. The loop advances it; observers read it, and can stop training."""

    plan: RunPlan
    batches: BatchSchedule
    state: TrainState  # after the last step that the host has queued
    num_steps: int  # steps of the whole run, including those before the newest checkpoint
    is_stopped: bool = False  # a stop was requested; set on all ranks after the same step
    is_best: bool = False  # the evaluation after the last step is the best one so far

    def __post_init__(self) -> None:
        self.first_step = self.state.step + 1

    @classmethod
    def resume(cls, plan: RunPlan, batches: BatchSchedule, state: TrainState) -> Self:
        """Start, or continue from a checkpoint's state; drop its best evaluation if the run selects another metric."""
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
        return self.state.step

    @property
    def is_stopped_early(self) -> bool:
        patience = self.plan.recipe.evaluation.early_stopping_patience
        worse = self.state.evaluations_without_improvement
        return patience is not None and worse >= patience and self.step < self.num_steps

    @property
    def is_complete(self) -> bool:
        return self.step == self.num_steps or self.is_stopped_early

    @property
    def is_over(self) -> bool:
        return self.is_stopped or self.is_complete

    @property
    def outcome(self) -> Literal["completed", "stopped"]:
        return "completed" if self.is_complete else "stopped"

    @property
    def is_evaluation_due(self) -> bool:
        evaluation = self.plan.recipe.evaluation
        if evaluation.every_steps is None:
            return False
        if self.step == self.num_steps:  # the full evaluation follows after training
            return evaluation.selection is not None
        return self.step % evaluation.every_steps == 0

    @property
    def is_checkpoint_due(self) -> bool:
        return self.step % self.plan.recipe.training.checkpoint_every_steps == 0

    @property
    def has_host_sync(self) -> bool:
        """Whether the host waits for the device after this step anyway, so the step can be reported immediately."""
        is_end = self.step in {self.first_step, self.num_steps}
        return is_end or self.is_stopped or self.is_evaluation_due or self.is_checkpoint_due

    def add_evaluation(self, record: EvaluationRecord, criterion: BestSpec) -> None:
        """Compare an evaluation with the best one so far, and count evaluations without improvement, as transformers.

        Any better value becomes the best one. Only a gain above the threshold counts as an improvement.
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
    """Check that an evaluation measured the metric that selects the best one; otherwise, there would never be one."""
    if record is None or criterion is None or record.measures(criterion.metric):
        return
    raise DataError(
        f"evaluation.best.metric '{criterion.metric}' was not measured",
        meaning="no row of the validation split that was evaluated has a score, such as tool calls for 'calls'",
        fix=f"choose one that was: {', '.join(['loss', 'perplexity', *record.scores])}",
    )


Phase = Literal["batch", "forward", "backward", "update", "reduce"]


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a step on this rank; tensors are on the device."""

    batch: StepBatch
    loss: torch.Tensor  # summed over the targets of this rank
    source_losses: SourceLosses
    router_sums: RouterSums
    grad_norm: torch.Tensor  # L2 norm of the whole gradient, over all ranks
    learning_rate: float


@dataclass(frozen=True)
class StepTiming:
    """Seconds of one step on the host's clock. The host runs at most one step ahead of the GPU."""

    seconds: float  # without checkpoints and evaluations
    work_seconds: float  # forward, backward and optimizer
    wait_seconds: float  # waiting for a batch


@dataclass(frozen=True)
class StepResult:
    """A step, reduced over all ranks.

    `loss` is the mean over targets or pairs, `sources` has the losses per source, `scores` the objective's metrics.
    """

    step: int
    batch: StepBatch
    loss: float
    sources: dict[str, SourceLoss]
    grad_norm: float
    learning_rate: float
    stop_requested: bool
    timing: StepTiming
    routers: RouterStats | None = None
    scores: dict[str, float] = field(default_factory=dict)


class Observer:
    """Attached to the training loop. By default, each method does nothing."""

    def start(self) -> None:
        """Called before the first step."""

    def begin(self, phase: Phase) -> None:
        """Called when a phase of the next step begins; "forward" and "backward" begin once per micro-batch."""

    def reduce(self, outcome: StepOutcome) -> Iterable[StepResult]:
        """Called with a step that the host has queued; return the results that are known by now. Collective."""
        del outcome
        return ()

    def report(self, result: StepResult) -> None:
        """Called with the result of a step, equal on all ranks, once the device has completed it."""

    def end_step(self) -> None:
        """Called when the host has queued a step, which `Progress` counts. Long work belongs here."""

    def finish(self) -> None:
        """Called when training has ended without an error."""

    def close(self) -> None:
        """End after the last step, or after an error."""


class Observers:
    """Calls observers in the order of their list; at the end in reverse."""

    def __init__(self, observers: list[Observer]) -> None:
        self.all = observers

    @contextmanager
    def attached(self) -> Iterator[None]:
        with ExitStack() as stack:
            for observer in self.all:
                observer.start()
                stack.callback(observer.close)
            yield
            for observer in self.all:
                observer.finish()

    def begin(self, phase: Phase) -> None:
        for observer in self.all:
            observer.begin(phase)

    def end_step(self, outcome: StepOutcome) -> None:
        self.begin("reduce")
        for result in chain.from_iterable(observer.reduce(outcome) for observer in self.all):
            for observer in self.all:
                observer.report(result)
        for observer in self.all:
            observer.end_step()
