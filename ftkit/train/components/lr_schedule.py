"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftkit.config.training import TrainingPlan


def learning_rate_at(step: int, num_steps: int, training: TrainingPlan) -> float:
    """Return the learning rate of a step, counted from 0.

    Rises linearly over the first `warmup_ratio` of all steps, and reaches its height with the last of them; then
    stays, or falls to `min_learning_rate_ratio` along a line or half a cosine (Loshchilov & Hutter 2017, eq. 5).
    """
    warmup = round(training.warmup_ratio * num_steps)
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    low = training.min_learning_rate_ratio
    match training.schedule:
        case "constant":
            part = 1.0
        case "linear":
            part = 1 - (1 - low) * progress
        case "cosine":
            part = low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2
    return training.learning_rate * part
