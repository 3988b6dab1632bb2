"""Run tasks of lm-evaluation-harness, which define their data and prompts, on a loaded model."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from ftkit.errors import DataError, NotFoundError, PrerequisiteError, one_line
from ftkit.evaluate.measure import Result

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ftkit.evaluate.load import LoadedModel

_QUANTILE = 1.96
"""Standard errors of a 95% interval of the normal distribution."""


class Harness:
    """The selected tasks of lm-evaluation-harness."""

    def __init__(self, tasks: Sequence[str], folder: Path | None = None) -> None:
        """Find the tasks.

        Args:
            tasks: names of tasks or groups, or patterns of them.
            folder: a folder with additional tasks as YAML files. Only the harness's tasks if None.

        Raises:
            PrerequisiteError: the harness is not installed.
            NotFoundError: it has no such task.
        """
        try:
            from lm_eval.tasks import TaskManager  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise PrerequisiteError(
                f"--harness needs lm-evaluation-harness: {one_line(error)}",
                meaning="ftkit was installed without it",
                fix="pip install 'ftkit[harness]'",
            ) from error
        for name in ("lm_eval", "lm-eval"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._manager = TaskManager(include_path=None if folder is None else str(folder))
        unknown = [task for task in tasks if not self._manager.match_tasks([task])]
        if unknown:
            raise NotFoundError(
                f"lm-evaluation-harness has no task '{unknown[0]}'",
                fix="list them: lm-eval ls tasks; your own tasks: --harness-tasks FOLDER",
            )
        self._tasks = self._manager.match_tasks(list(tasks))

    def evaluate(self, model: LoadedModel, limit: int | None, batch_size: int) -> dict[str, Any]:
        """Return the harness's results for a model.

        Args:
            model: the model.
            limit: maximum number of questions of each task. All if None.
            batch_size: questions per batch.

        Raises:
            DataError: a task can't be loaded or run; most are downloaded from the hub.
        """
        from lm_eval import simple_evaluate  # noqa: PLC0415 - an extra
        from lm_eval.models.huggingface import HFLM  # noqa: PLC0415

        with model.inference() as hf_model:
            try:
                adapted = HFLM(pretrained=hf_model, tokenizer=model.tokenizer, batch_size=batch_size)
                found: dict[str, Any] = simple_evaluate(
                    adapted, tasks=self._tasks, limit=limit, task_manager=self._manager, log_samples=False
                )
            except Exception as error:  # tasks contain code and data of others, which may raise anything
                raise DataError(
                    f"lm-evaluation-harness failed on {', '.join(self._tasks)}: {one_line(error)}",
                    meaning="most tasks are downloaded from the Hugging Face hub when they are first used",
                    fix="check that this machine reaches the hub, and HF_TOKEN for gated data",
                ) from error
        return found


def compare_harness(after: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[Result]:
    """Return all scores of the harness with intervals from its standard errors.

    Scores before and after are treated as independent, which makes intervals of changes too wide.
    """
    results = []
    for task, scores in after["results"].items():
        counts = after.get("n-samples", {}).get(task, {})
        is_better_higher = after.get("higher_is_better", {}).get(task, {})
        for key, value in scores.items():
            name, _, variant = key.partition(",")
            if not variant or name.endswith("_stderr") or not isinstance(value, float | int):
                continue
            earlier = None if before is None else before["results"].get(task, {}).get(key)
            error = _error(scores, name, variant)
            change = None if earlier is None else value - earlier
            if earlier is not None and before is not None:
                error = math.hypot(error, _error(before["results"][task], name, variant))
            middle = value if change is None else change
            is_lower_better = is_better_higher.get(name) is False
            results.append(
                Result(
                    metric=f"{task} {name}" + (f" ({variant})" if variant != "none" else ""),
                    source="",
                    before=earlier,
                    after=value,
                    change=change,
                    interval=(middle - _QUANTILE * error, middle + _QUANTILE * error),
                    num_cases=counts.get("effective", 0),
                    is_part=not is_lower_better and 0 <= value <= 1,
                    is_lower_better=is_lower_better,
                )
            )
    return results


def _error(scores: Mapping[str, Any], name: str, variant: str) -> float:
    """Return the standard error of a score; NaN if the harness has none."""
    error = scores.get(f"{name}_stderr,{variant}")
    return float(error) if isinstance(error, float | int) else math.nan
