"""Evaluate a run's checkpoints on the same rows while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ftkit.errors import FtkitError, one_line
from ftkit.evaluate.loaded_model import LoadedModel, available_devices, load_model
from ftkit.evaluate.results import to_record
from ftkit.evaluate.scoring import Ranks, evaluation_set, joined_ranks, measure
from ftkit.evaluate.source import MeasureSettings, TrainedStep
from ftkit.files import parse_json
from ftkit.planning.plan import RunPlan, read_plan
from ftkit.runs.history import read_summary
from ftkit.runs.metrics_file import append_record, read_job_evaluations, read_records
from ftkit.runs.records import EvaluationRecord
from ftkit.train.components.recorder import open_trackers

if TYPE_CHECKING:
    from ftkit.data.cases import EvaluationSet
    from ftkit.data.completion_metrics import Metric
    from ftkit.planning.layout import RunLayout

POLL_SECONDS = 5.0


def evaluate_checkpoints(
    layout: RunLayout, settings: str, is_over: Callable[[], bool], report: Callable[[str], None]
) -> None:
    """Evaluate checkpoints, newest first, until the run has ended and none is left; then update the trackers.

    `is_over` tells whether the run will write no further checkpoint. Collective.
    """
    plan, parsed = read_plan(layout), parse_json(settings, MeasureSettings)
    done = {record.step for record in read_records(layout.evaluations) if isinstance(record, EvaluationRecord)}
    data: tuple[EvaluationSet, list[Metric]] | None = None
    with joined_ranks() as ranks:
        while True:
            # The order matters: the last checkpoint may be completed in between.
            was_over = is_over()
            newest = max((step for step, _ in layout.list_checkpoints() if step not in done), default=None)
            was_over, step = ranks.exchange((was_over, newest))[0]
            if step is None:
                if was_over:
                    break
                time.sleep(POLL_SECONDS)
                continue
            done.add(step)
            report(f"evaluating the checkpoint of step {step}")
            model = _load(TrainedStep(layout, plan, step), ranks, report)
            if model is None:
                continue
            data = data or evaluation_set(model.input, plan, parsed, report)
            measured = measure(model, *data, parsed, ranks)
            if ranks.is_first:
                record = to_record(step, *data, measured)
                append_record(layout.evaluations, record)
                scores = "".join(f", {name} {value:.4g}" for name, value in record.scores.items())
                report(f"step {step}: loss {record.loss:.4f}, perplexity {record.perplexity:.4g}{scores}")
        if ranks.is_first:
            send_to_trackers(plan, read_job_evaluations(layout.metrics, layout.evaluations))


def _load(source: TrainedStep, ranks: Ranks, report: Callable[[str], None]) -> LoadedModel | None:
    """Load a checkpoint on all ranks; return None if a rank can't, because it is deleted or damaged."""
    model, reason = None, ""
    try:
        model = load_model(source, *available_devices())
    except (FtkitError, OSError) as error:
        reason = one_line(error)
    if reasons := [each for each in ranks.exchange(reason) if each]:
        report(f"step {source.step} is skipped; it was deleted or damaged in the meantime: {reasons[0]}")
        return None
    return model


def send_to_trackers(plan: RunPlan, late: list[EvaluationRecord]) -> None:
    """Send the trackers the evaluations that the trainer did not copy before it ended."""
    history = read_summary(plan.layout)
    start, end = history.start, history.end
    if late and start is not None:
        # Act as a run that is resumed after the last step, so that trackers keep earlier records.
        last = max(end.step if end else 0, *(record.step for record in late))
        with open_trackers(plan) as send:
            send(replace(start, resumed_from=last))
            for record in late:
                send(record)
            if end is not None:
                send(end)
