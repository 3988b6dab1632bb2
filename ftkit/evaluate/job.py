"""Evaluate the checkpoints of a run while it trains, in a separate job that ends when the run does."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.errors import FtkitError, one_line
from ftkit.evaluate.devices import available_devices
from ftkit.evaluate.load import load_model
from ftkit.evaluate.measure import evaluation_set, measure, to_record
from ftkit.evaluate.source import TrainedStep
from ftkit.planning.plan import read_plan
from ftkit.runs.metrics_file import append_record, read_job_evaluations, read_outline, read_records
from ftkit.runs.records import EndRecord, EvaluationRecord, StartRecord
from ftkit.train.components.recorder import send_late

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.data.cases import EvaluationSet
    from ftkit.data.metrics import Metric
    from ftkit.evaluate.load import LoadedModel
    from ftkit.evaluate.measure import MeasureSettings
    from ftkit.evaluate.ranks import Ranks
    from ftkit.planning.layout import RunLayout
    from ftkit.planning.plan import RunPlan

POLL_SECONDS = 5.0


class CheckpointEvaluations:
    """The evaluations of a run's checkpoints, on the same rows. Collective: all ranks call the same methods."""

    def __init__(
        self, layout: RunLayout, settings: MeasureSettings, ranks: Ranks, report: Callable[[str], None]
    ) -> None:
        self._layout, self._settings, self._ranks, self._report = layout, settings, ranks, report
        self._plan: RunPlan = read_plan(layout)
        earlier = read_records(layout.evaluations)
        self._done = {record.step for record in earlier if isinstance(record, EvaluationRecord)}
        self._data: EvaluationSet | None = None
        self._metrics: list[Metric] = []

    def follow(self, is_over: Callable[[], bool], pause: Callable[[float], None] = time.sleep) -> None:
        """Evaluate checkpoints, newest first, until the run has ended and none is left; then update the trackers.

        Args:
            is_over: whether no further checkpoint will be written.
            pause: sleeps for a number of seconds.
        """
        while True:
            # In this order: the last checkpoint may be completed in between.
            was_over, step = self._ranks.exchange((is_over(), self._newest()))[0]
            if step is not None:
                self._evaluate(step)
            elif was_over:
                break
            else:
                pause(POLL_SECONDS)
        if self._ranks.is_first:
            self._send_late()

    def _newest(self) -> int | None:
        steps = [step for step, _ in self._layout.list_checkpoints() if step not in self._done]
        return max(steps, default=None)

    def _evaluate(self, step: int) -> None:
        """Measure the checkpoint of a step, unless it is deleted or damaged, and record that."""
        self._done.add(step)
        self._report(f"evaluating the checkpoint of step {step}")
        model, reason = None, ""
        try:
            model = load_model(TrainedStep(self._layout, self._plan, step), *available_devices())
        except (FtkitError, OSError) as error:
            reason = one_line(error)
        reasons = [each for each in self._ranks.exchange(reason) if each]
        if model is None or reasons:
            self._report(f"step {step} is skipped; it was deleted or damaged in the meantime: {reasons[0]}")
            return
        data = self._data_for(model)
        measured = measure(model, data, self._metrics, self._settings, self._ranks)
        if self._ranks.is_first:
            record = to_record(step, data, self._metrics, measured)
            append_record(self._layout.evaluations, record)
            scores = "".join(f", {name} {value:.4g}" for name, value in record.scores.items())
            self._report(f"step {step}: loss {record.loss:.4f}, perplexity {record.perplexity:.4g}{scores}")

    def _data_for(self, model: LoadedModel) -> EvaluationSet:
        """Return the encoded rows, which are the same for all checkpoints of the run."""
        if self._data is None:
            self._data, self._metrics = evaluation_set(model, self._plan, self._settings, self._report)
        return self._data

    def _send_late(self) -> None:
        """Send the trackers the evaluations that the trainer did not copy before it ended."""
        late = read_job_evaluations(self._layout.metrics, self._layout.evaluations)
        start = end = None
        for record in read_outline(self._layout.metrics):
            start = record if isinstance(record, StartRecord) else start
            end = record if isinstance(record, EndRecord) else end
        if late and start is not None:
            step = max(record.step for record in late)
            # Like a run that is resumed after the last step, so that trackers keep earlier records.
            start = replace(start, resumed_from=max(step, end.step if end else 0))
            send_late(self._plan, [start, *late, *([end] if end else [])])


def is_training_over() -> bool:
    """Return whether the job script has detected the end of the training job."""
    return Path(os.environ["FTKIT_STOP_FILE"]).exists()
