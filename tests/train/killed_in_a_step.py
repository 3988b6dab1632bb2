"""A rank that is killed, or fails, at the start of a step; it is started as the trainer.

Arguments: the step; `behind` for a device that runs asynchronously, as GPUs do; another word to fail, or `nan` for a
NaN loss on the last rank; the plan.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ftkit.train import trainer
from ftkit.train.__main__ import main
from ftkit.train.loop import Observer, Observers, train
from ftkit.train.observers import Saving
from ftkit.train.observers.step_metrics import StepMetrics

STEP, PACE = int(sys.argv[1]), sys.argv[2]
HAPPENS = sys.argv[3] if len(sys.argv) > 4 else "kill"


class Death(Observer):
    """Ends this rank before it waits for the batch of the step."""

    def __init__(self, progress: Any, saving: Saving) -> None:
        self._progress = progress
        self._checkpointer = saving._checkpointer

    def begin(self, phase: str) -> None:
        if phase != "batch" or self._progress.step != STEP - 1 or HAPPENS == "nan":
            return
        self._checkpointer.wait()
        if HAPPENS == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError


class Batches:
    """Batches of which one has a loss that is not a number on the last rank."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def step(self, step: int) -> Any:
        batch = self._batches.step(step)
        is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        return replace(batch, num_targets=float("nan")) if step == STEP - 1 and is_last else batch


def with_death(world: Any, engine: Any, progress: Any, observers: Observers, num_sources: int) -> None:
    (saving,) = (each for each in observers.all if isinstance(each, Saving))
    (metrics,) = (each for each in observers.all if isinstance(each, StepMetrics))
    metrics.is_behind = PACE == "behind"
    if HAPPENS == "nan":
        progress.batches = Batches(progress.batches)
    observers.all.insert(0, Death(progress, saving))
    train(world, engine, progress, observers, num_sources)


trainer.train = with_death
os._exit(main(Path(sys.argv[-1])))  # as the trainer does
