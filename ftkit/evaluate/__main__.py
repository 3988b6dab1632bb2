"""`python -m ftkit.evaluate PLAN SETTINGS`: a job beside training that evaluates a run's checkpoints.

SETTINGS are `MeasureSettings` as JSON. The job ends when the run does.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.data.imports import import_transformers
from ftkit.errors import FtkitError, one_line, redact
from ftkit.files import parse_json
from ftkit.planning.layout import RunLayout
from ftkit.planning.plan import read_plan
from ftkit.runs.metrics_file import append_record, read_job_evaluations, read_outline, read_records
from ftkit.runs.records import EndRecord, EvaluationRecord, StartRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.data.cases import EvaluationSet
    from ftkit.data.completion_metrics import Metric
    from ftkit.evaluate.measure import MeasureSettings, Ranks

POLL_SECONDS = 5.0


class CheckpointEvaluations:
    """Evaluates a run's checkpoints on the same rows. Collective: all ranks call the same methods."""

    def __init__(
        self, layout: RunLayout, settings: MeasureSettings, ranks: Ranks, report: Callable[[str], None]
    ) -> None:
        self._layout, self._settings, self._ranks, self._report = layout, settings, ranks, report
        self._plan = read_plan(layout)
        earlier = read_records(layout.evaluations)
        self._done = {record.step for record in earlier if isinstance(record, EvaluationRecord)}
        self._data: tuple[EvaluationSet, list[Metric]] | None = None

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
        """Measure the checkpoint of a step and record it, unless the checkpoint is deleted or damaged."""
        from ftkit.evaluate.compare import to_record  # noqa: PLC0415 - imports transformers, which can fail
        from ftkit.evaluate.load import available_devices, load_model  # noqa: PLC0415
        from ftkit.evaluate.measure import evaluation_set, measure  # noqa: PLC0415
        from ftkit.evaluate.source import TrainedStep  # noqa: PLC0415

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
        if self._data is None:
            self._data = evaluation_set(model, self._plan, self._settings, self._report)
        data, metrics = self._data
        measured = measure(model, data, metrics, self._settings, self._ranks)
        if self._ranks.is_first:
            record = to_record(step, data, metrics, measured)
            append_record(self._layout.evaluations, record)
            scores = "".join(f", {name} {value:.4g}" for name, value in record.scores.items())
            self._report(f"step {step}: loss {record.loss:.4f}, perplexity {record.perplexity:.4g}{scores}")

    def _send_late(self) -> None:
        """Send the trackers the evaluations that the trainer did not copy before it ended."""
        from ftkit.train.components.recorder import open_trackers  # noqa: PLC0415 - imports torch, as above

        late = read_job_evaluations(self._layout.metrics, self._layout.evaluations)
        start = end = None
        for record in read_outline(self._layout.metrics):
            start = record if isinstance(record, StartRecord) else start
            end = record if isinstance(record, EndRecord) else end
        if late and start is not None:
            step = max(record.step for record in late)
            # Like a run that is resumed after the last step, so that trackers keep earlier records.
            start = replace(start, resumed_from=max(step, end.step if end else 0))
            with open_trackers(self._plan) as send:
                send(start)
                for evaluation in late:
                    send(evaluation)
                if end is not None:
                    send(end)


def main(plan_path: Path, settings: str) -> int:
    """Evaluate until the job script has detected the end of training; report errors."""
    rank = int(os.environ.get("RANK", "0"))

    def report(text: str) -> None:
        if rank == 0:
            sys.stderr.write(f"evaluate: {redact(text, os.environ)}\n")

    try:
        import_transformers()  # before modules that import more of it
        from ftkit.evaluate.measure import MeasureSettings, joined_ranks  # noqa: PLC0415

        with joined_ranks() as ranks:
            parsed = parse_json(settings, MeasureSettings)
            evaluations = CheckpointEvaluations(RunLayout(plan_path.parent), parsed, ranks, report)
            evaluations.follow(Path(os.environ["FTKIT_STOP_FILE"]).exists)
    except Exception as error:  # noqa: BLE001 - any error is the reason why the job ends
        text = str(error) if isinstance(error, FtkitError) else traceback.format_exc()
        sys.stderr.write(f"evaluate: error: {redact(text, os.environ)}\n")
        return error.exit_code if isinstance(error, FtkitError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
