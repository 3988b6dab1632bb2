"""The interface between the training loop and what is attached to it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, Self

import torch

from ftkit.runs.records import RouterStats, SourceLoss
from ftkit.train.causal_lm import SourceLosses
from ftkit.train.components.batches import StepBatch
from ftkit.train.model.routers import RouterSums

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType


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

    def begin(self, phase: Phase) -> None:
        """Take notice of a phase of the next step; "forward" and "backward" begin once for each micro-batch."""

    def report(self, result: StepResult) -> None:
        """Take the result of a step, the same on all ranks, once the device has completed it."""

    def end_step(self) -> None:
        """Take notice that the host has queued a step, which `Progress` counts; what takes long belongs here."""

    def start(self) -> None:
        """Start before the first step."""

    def finish(self) -> None:
        """Take notice that training ended without an error."""

    def close(self) -> None:
        """End after the last step, or after an error."""


class Reducer(Protocol):
    """Computes the results of steps."""

    def reduce(self, outcome: StepOutcome) -> Iterable[StepResult]:
        """Take a step that the host has queued; yield the results that are known by now. Collective."""


class Observers:
    """Calls observers in the order of their list; at the end in reverse."""

    def __init__(self, reducer: Reducer, observers: list[Observer]) -> None:
        self.all = observers
        self._reducer = reducer
        self._stack = ExitStack()

    def begin(self, phase: Phase) -> None:
        """Tell all that a phase begins."""
        for observer in self.all:
            observer.begin(phase)

    def end_step(self, outcome: StepOutcome) -> None:
        """Report the results that are known after a step, and tell all that it ends."""
        self.begin("reduce")
        for result in self._reducer.reduce(outcome):
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
