"""Anomalous steps: a loss or gradient that is not finite, and spikes."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Literal

from ftkit.errors import TrainingError
from ftkit.runs.records import AnomalyRecord
from ftkit.train.observers.observer import Observer

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.config.training import OnNonfinite
    from ftkit.train.components.recorder import Recorder
    from ftkit.train.observers.observer import StepResult

log = logging.getLogger(__name__)

_WINDOW, _MIN_STEPS, _SIGMAS = 128, 32, 6.0
"""A spike is 6 standard deviations above the mean of the last 128 steps, and needs 32 of them (OLMo-core's
SkipStepOptimizer). Logarithms are compared: losses and gradient norms are positive and skewed, and single batches often
multiply a norm near zero."""
_FLOOR = 1e-3
"""Smaller values are raised to this one: a multiple of a negligible loss is negligible too."""
_MIN_RISE = math.log(1.1)
"""A spike is at least 10% above the mean: the deviation of steps that hardly differ is rounding."""
_MAX_SKIPPED = 10
"""Consecutive skipped steps after which the cause is not single batches."""
_MAX_SHOWN = 8


class AnomalyWatch(Observer):
    """Checks each step's loss and gradient norm, which are equal on all ranks once they are reduced.

    An engine skips the optimizer step of a gradient that is not finite, on the device. The host detects it here, one
    step later, without waiting for the device.
    """

    def __init__(
        self, run_id: str, policy: OnNonfinite, recorder: Recorder, packs_of_step: Callable[[int], list[int]]
    ) -> None:
        """Start without history; `packs_of_step` returns the packs of a step, counted from 0."""
        self._run_id = run_id
        self._policy = policy
        self._recorder = recorder
        self._packs_of_step = packs_of_step
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._num_skipped = 0

    def report(self, result: StepResult) -> None:
        """Record an anomalous step.

        Raises:
            TrainingError: its gradient is not finite, and the policy is to stop; or this happened too often in a row.
        """
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            self._report_nonfinite(result)
            return
        self._num_skipped = 0
        if _is_spike(result.loss, self._losses) or _is_spike(result.grad_norm, self._norms):
            log.warning(
                "step %d spikes: loss %.4f (mean %.4f), grad norm %.2f (mean %.2f); packs %s",
                result.step, result.loss, fmean(self._losses), result.grad_norm, fmean(self._norms),
                self._record(result, "spike"),
            )  # fmt: skip
        self._losses.append(result.loss)
        self._norms.append(result.grad_norm)

    def _report_nonfinite(self, result: StepResult) -> None:
        packs = self._record(result, "nonfinite")
        self._num_skipped += 1
        what = f"step {result.step}: loss {result.loss:.4f}, grad norm {result.grad_norm:.2f}; its update was skipped"
        if self._policy == "skip" and self._num_skipped < _MAX_SKIPPED:
            log.warning("%s; packs %s", what, packs)
            return
        resume = f"ftkit resume {self._run_id}"
        raise TrainingError(
            what if self._policy == "stop" else f"{what}, as were the {_MAX_SKIPPED - 1} before it",
            meaning="broken examples, a learning rate that is too high, or a precision that is too low; "
            "the newest checkpoint is intact",
            fix=f"inspect its packs: ftkit data show --packs {packs.removesuffix(',…')} {self._run_id}; "
            + (f"to skip such steps: {resume} training.on_nonfinite=skip" if self._policy == "stop" else resume),
        )

    def _record(self, result: StepResult, kind: Literal["nonfinite", "spike"]) -> str:
        """Write a record; return the first packs of the step as text."""
        packs = self._packs_of_step(result.step - 1)
        self._recorder.write(AnomalyRecord(time.time(), result.step, kind, result.loss, result.grad_norm, tuple(packs)))
        return ",".join(map(str, packs[:_MAX_SHOWN])) + (",…" if len(packs) > _MAX_SHOWN else "")


def _is_spike(value: float, before: deque[float]) -> bool:
    if len(before) < _MIN_STEPS:
        return False
    usual = [math.log(max(each, _FLOOR)) for each in before]
    return math.log(max(value, _FLOOR)) > fmean(usual) + max(_SIGMAS * pstdev(usual), _MIN_RISE)
