"""The training loop, and its interface to the observers that are attached to it."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal, Self

import torch

from ftkit.runs.records import RouterStats, SourceLoss
from ftkit.train.causal_lm import SourceLosses
from ftkit.train.components.batches import StepBatch, prefetched
from ftkit.train.components.optimizer import learning_rate_at
from ftkit.train.model.routers import RouterSums

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from ftkit.train.engine import Engine
    from ftkit.train.run_progress import Progress
    from ftkit.train.world import World


def train(world: World, engine: Engine, progress: Progress, observers: Observers, num_sources: int = 0) -> None:
    """Train until the last step, early stopping or a stop request."""
    device, training = world.device, progress.plan.recipe.training
    steps = range(progress.step, progress.num_steps)
    with observers, prefetched(progress.batches.step, steps, device) as batches:
        while not progress.is_over:
            observers.begin("batch")
            batch = next(batches)
            torch.manual_seed(_seed_of_step(training.seed, progress.step, world))
            losses, source_losses = [], SourceLosses(num_sources, device)
            for number, micro_batch in enumerate(batch.micro_batches, start=1):
                observers.begin("forward")
                loss = engine.forward(micro_batch, source_losses)
                observers.begin("backward")
                engine.backward(loss, batch.num_targets, is_last=number == len(batch.micro_batches))
                losses.append(loss.detach())
                del loss  # and its graph
            observers.begin("update")
            learning_rate = learning_rate_at(progress.step, progress.num_steps, training)
            grad_norm = engine.step(learning_rate, training.max_grad_norm)  # clips the gradient first
            router_sums = engine.model.routers.take()
            progress.advance(batch)
            total = torch.stack(losses).sum()
            observers.end_step(StepOutcome(batch, total, source_losses, router_sums, grad_norm, learning_rate))


def _seed_of_step(seed: int, step: int, world: World) -> int:
    """Return the seed of what a model's own class draws; adapters' dropout has its own (`Dropout`).

    Equal when a step is repeated after a resume, and on ranks that divide layers.
    """
    text = f"{seed} {step} {world.rank // world.tensor_parallel}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


# --- Observers -----------------------------------------------------------------------------------


Phase = Literal["batch", "forward", "backward", "update", "reduce"]


@dataclass(frozen=True)
class StepOutcome:
    """A step of this rank; tensors are on the device."""

    batch: StepBatch
    loss: torch.Tensor  # summed over the targets of this rank
    source_losses: SourceLosses
    router_sums: RouterSums
    grad_norm: torch.Tensor  # L2 norm of the whole gradient, over all ranks
    learning_rate: float


@dataclass(frozen=True)
class StepTiming:
    """Seconds of one step on the host's clock.

    The host runs ahead of a GPU by a step at most, so over several steps these are the GPU's seconds too.
    """

    seconds: float  # without checkpoints and evaluations
    work_seconds: float  # forward, backward and optimizer
    wait_seconds: float  # waiting for a batch


@dataclass(frozen=True)
class StepResult:
    """A step, reduced over all ranks; `loss` is the mean over its targets, `sources` has that of each source."""

    step: int
    batch: StepBatch
    loss: float
    sources: dict[str, SourceLoss]
    grad_norm: float
    learning_rate: float
    stop_requested: bool
    timing: StepTiming
    routers: RouterStats | None = None


class Observer:
    """Attached to the training loop. A method that a subclass does not override does nothing."""

    def start(self) -> None:
        """Start before the first step."""

    def begin(self, phase: Phase) -> None:
        """Take notice of a phase of the next step; "forward" and "backward" begin once for each micro-batch."""

    def reduce(self, outcome: StepOutcome) -> Iterable[StepResult]:
        """Take a step that the host has queued; return the results that are known by now. Collective."""
        del outcome
        return ()

    def report(self, result: StepResult) -> None:
        """Take the result of a step, the same on all ranks, once the device has completed it."""

    def end_step(self) -> None:
        """Take notice that the host has queued a step, which `Progress` counts; what takes long belongs here."""

    def finish(self) -> None:
        """Take notice that training ended without an error."""

    def close(self) -> None:
        """End after the last step, or after an error."""


class Observers:
    """Calls observers in the order of their list; at the end in reverse."""

    def __init__(self, observers: list[Observer]) -> None:
        self.all = observers
        self._stack = ExitStack()

    def begin(self, phase: Phase) -> None:
        for observer in self.all:
            observer.begin(phase)

    def end_step(self, outcome: StepOutcome) -> None:
        """Report the results that are known after a step, and tell all that it ends."""
        self.begin("reduce")
        for result in chain.from_iterable(observer.reduce(outcome) for observer in self.all):
            for observer in self.all:
                observer.report(result)
        for observer in self.all:
            observer.end_step()

    def __enter__(self) -> Self:
        for observer in self.all:
            observer.start()
            self._stack.callback(observer.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._stack:
            if error is None:
                for observer in self.all:
                    observer.finish()
