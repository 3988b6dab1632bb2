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

from ftkit.train.__main__ import main
from ftkit.train.loop import TrainingLoop


def train_step_or_die(training: TrainingLoop, batch: Any) -> Any:
    if training.state.step == int(sys.argv[1]) - 1 and sys.argv[3] == "nan":
        if training.world.rank == training.world.size - 1:
            batch = replace(batch, num_targets=float("nan"))
    elif training.state.step == int(sys.argv[1]) - 1:
        training.checkpointer.wait()
        if len(sys.argv) > 4:
            raise ZeroDivisionError
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(training, batch)


def waits_for_step(training: TrainingLoop) -> bool:
    return training._is_evaluation_due() or training._is_checkpoint_due()


train_step = TrainingLoop._train_step
TrainingLoop._train_step = train_step_or_die  # type: ignore[method-assign]
if sys.argv[2] == "behind":
    TrainingLoop._syncs_with_step = waits_for_step  # type: ignore[method-assign]
os._exit(main(Path(sys.argv[-1])))  # as the trainer does
