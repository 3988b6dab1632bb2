"""The learning rate schedule: the only place that computes a step's learning rate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftkit.config.training_plan import TrainingPlan


def learning_rate_at(step: int, num_steps: int, training: TrainingPlan) -> float:
    """Return the learning rate of a step.

    It rises linearly over the first `warmup_ratio` of all steps, to `learning_rate` at the last of these. Then it stays
    constant, or decays to `min_learning_rate_ratio` of that, linearly or along a cosine (Loshchilov & Hutter 2017,
    eq. 5).

    Args:
        step: counted from 0.
        num_steps: of the run.
        training: the schedule.
    """
    warmup = round(training.warmup_ratio * num_steps)
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    low = training.min_learning_rate_ratio
    match training.schedule:
        case "constant":
            factor = 1.0
        case "linear":
            factor = 1 - (1 - low) * progress
        case "cosine":
            factor = low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2
    return training.learning_rate * factor
