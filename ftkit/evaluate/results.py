"""Compare two models on the same rows, with confidence intervals, or on tasks of lm-evaluation-harness."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftkit.errors import DataError, NotFoundError, PrerequisiteError, one_line
from ftkit.runs.records import EvaluationRecord, SourceLoss

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ftkit.data.cases import EvaluationSet
    from ftkit.data.completion_metrics import Metric
    from ftkit.evaluate.loaded_model import LoadedModel
    from ftkit.evaluate.scoring import Measured

NUM_RESAMPLES = 2000
_BATCH_SIZE = 100  # resamples per batch, which bounds the memory
_QUANTILE = 1.96  # standard errors of a 95% interval of the normal distribution

Interval = tuple[float, float]


@dataclass(frozen=True)
class Result:
    metric: str
    source: str  # of the rows; empty for all
    before: float | None
    after: float
    change: float | None
    interval: Interval  # of 95% confidence: of the change, or of `after` if there is no `before`
    num_cases: int  # rows for losses, completions for other metrics
    is_part: bool
    is_lower_better: bool


@dataclass(frozen=True)
class Example:
    """A case whose score changed."""

    metric: str
    where: str
    prompt: str
    reference: str | None
    before: str
    after: str
    change: float


class _Column(NamedTuple):
    """A metric of both models as ratios over rows."""

    name: str
    source: str
    after: Ratio
    before: Ratio | None
    num_cases: int
    is_part: bool
    is_lower_better: bool


_LOSSES = (("loss", 0, False), ("perplexity", 0, False), ("token_accuracy", 2, True))
"""Metrics of labels: name, column of `Measured.loss`, and whether it is a part of the labels; others are better low."""


def compare(
    data: EvaluationSet, metrics: Sequence[Metric], after: Measured, before: Measured | None, seed: int
) -> list[Result]:
    """Return all metrics with their intervals: losses of all rows and of each source, then those of completions."""
    results = []
    for name, source, new, old, num_cases, is_part, is_lower_better in _columns(data, metrics, after, before):
        # exp(loss) overflows above 709.
        shown = (lambda values: np.exp(np.minimum(values, 700.0))) if name == "perplexity" else np.asarray
        value, earlier, change = float(shown(new.value)), None, None
        if old is None:
            interval = paired_interval((new,), shown, seed)
        else:
            earlier = float(shown(old.value))
            change = value - earlier
            interval = paired_interval((new, old), lambda one, other, shown=shown: shown(one) - shown(other), seed)
        results.append(Result(name, source, earlier, value, change, interval, num_cases, is_part, is_lower_better))
    return results


def _columns(
    data: EvaluationSet, metrics: Sequence[Metric], after: Measured, before: Measured | None
) -> Iterator[_Column]:
    sources = list(dict.fromkeys(data.sources))
    for source in ["", *(sources if len(sources) > 1 else [])]:
        chosen = np.array([source in ("", each) for each in data.sources])
        new = after.loss * chosen[:, None]
        old = None if before is None else before.loss * chosen[:, None]
        if not new[:, 1].sum():
            continue
        num_rows = int((new[:, 1] > 0).sum())
        for name, place, is_part in _LOSSES:
            earlier = None if old is None else Ratio(old[:, place], old[:, 1])
            yield _Column(name, source, Ratio(new[:, place], new[:, 1]), earlier, num_rows, is_part, not is_part)
    rows = np.array([case.number for case in data.cases], np.int64)
    for metric in metrics:
        own = _ratio(rows, after.scores[metric.name], len(data.rows))
        if num_cases := int(own.denominators.sum()):
            earlier = _ratio(rows, before.scores[metric.name], len(data.rows)) if before else None
            yield _Column(metric.name, "", own, earlier, num_cases, metric.is_part, metric.is_lower_better)


def _ratio(rows: NDArray[np.int64], scores: Sequence[float | None], num_rows: int) -> Ratio:
    applies = np.array([score is not None for score in scores], np.float64)
    values = np.array([score or 0.0 for score in scores], np.float64)
    return Ratio(*(np.bincount(rows, each, num_rows).astype(np.float64) for each in (values, applies)))


def changed_examples(
    tokenizer: PreTrainedTokenizerBase, data: EvaluationSet, metric: Metric, after: Measured, before: Measured
) -> list[Example]:
    """Return the cases whose score changed, largest gains first."""
    sign, is_raw = -1 if metric.is_lower_better else 1, metric.name.startswith("call")
    found = []
    for number, case in enumerate(data.cases):
        new, old = after.scores[metric.name][number], before.scores[metric.name][number]
        if new is None or old is None or new == old:
            continue
        later, earlier = after.completions[number], before.completions[number]
        texts = [each.raw if is_raw else each.text for each in (earlier, later)]
        prompt = str(tokenizer.decode(case.prompt, skip_special_tokens=True)).strip()
        where = data.rows[case.number].where
        found.append(Example(metric.name, where, prompt, later.reference, texts[0], texts[1], sign * (new - old)))
    return sorted(found, key=lambda example: -example.change)


def to_record(step: int, data: EvaluationSet, metrics: Sequence[Metric], measured: Measured) -> EvaluationRecord:
    values = {(each.name, each.source): each.after.value for each in _columns(data, metrics, measured, None)}
    loss = values.get(("loss", ""), math.nan)
    targets = {source: 0 for _, source in values if source}
    for source, (_, num_targets, _) in zip(data.sources, measured.loss.tolist(), strict=True):
        if source in targets:
            targets[source] += int(num_targets)
    sources = {source: SourceLoss(values["loss", source], count) for source, count in targets.items()}
    scores = {metric.name: values[metric.name, ""] for metric in metrics if (metric.name, "") in values}
    return EvaluationRecord(time.time(), step, "job", loss, math.exp(min(loss, 700.0)), (), sources, scores)


# --- Confidence intervals --------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratio:
    """A metric as a ratio of sums over rows: of losses and tokens, or of scores and turns.

    Both arrays are float64 with a number for each row; a denominator is 0 if the metric does not apply to the row.
    """

    numerators: NDArray[np.float64]
    denominators: NDArray[np.float64]

    @property
    def value(self) -> float:
        return float(self.numerators.sum() / self.denominators.sum())


def paired_interval(
    ratios: tuple[Ratio, ...],
    combine: Callable[..., NDArray[np.float64]],
    seed: int,
    num_resamples: int = NUM_RESAMPLES,
) -> Interval:
    """Return the 95% interval of a function of ratios over the same rows, by percentiles.

    A resample has the same rows for all ratios, so the difficulty of a row cancels in the difference of two models
    (Efron and Tibshirani 1993, chapter 13). `combine` takes one array per ratio, with its value in each resample.
    """
    rng, num_rows = np.random.default_rng(seed), len(ratios[0].numerators)
    found = []
    for begin in range(0, num_resamples, _BATCH_SIZE):
        size = min(_BATCH_SIZE, num_resamples - begin)
        drawn = rng.multinomial(num_rows, np.full(num_rows, 1 / num_rows), size=size).astype(np.float64)
        sums = [(drawn @ ratio.numerators, drawn @ ratio.denominators) for ratio in ratios]
        # A resample without a row to which the metric applies has no value.
        is_used = np.all([below > 0 for _, below in sums], axis=0)
        found.append(combine(*(above[is_used] / below[is_used] for above, below in sums)))
    low, high = np.percentile(np.concatenate(found), (2.5, 97.5))
    return float(low), float(high)


# --- lm-evaluation-harness -------------------------------------------------------------------------


class Harness:
    def __init__(self, tasks: Sequence[str], folder: Path | None = None) -> None:
        """Find tasks by names, groups or patterns, in the harness and in a folder with YAML files of more tasks."""
        try:
            self._manager = import_module("lm_eval.tasks").TaskManager(include_path=folder and str(folder))
        except ImportError as error:
            raise PrerequisiteError(
                f"--harness needs lm-evaluation-harness: {one_line(error)}", fix="pip install 'ftkit[harness]'"
            ) from error
        for name in ("lm_eval", "lm-eval"):
            logging.getLogger(name).setLevel(logging.ERROR)
        if unknown := [task for task in tasks if not self._manager.match_tasks([task])]:
            raise NotFoundError(
                f"lm-evaluation-harness has no task '{unknown[0]}'",
                fix="list them: lm-eval ls tasks; your own tasks: --harness-tasks FOLDER",
            )
        self._tasks = self._manager.match_tasks(list(tasks))

    def evaluate(self, model: LoadedModel, limit: int | None, batch_size: int) -> dict[str, Any]:
        """Return the harness's results for a model, on at most `limit` questions of each task; all if None."""
        adapter = import_module("lm_eval.models.huggingface").HFLM
        with model.inference() as hf_model:
            try:
                found: dict[str, Any] = import_module("lm_eval").simple_evaluate(
                    adapter(pretrained=hf_model, tokenizer=model.tokenizer, batch_size=batch_size),
                    tasks=self._tasks,
                    limit=limit,
                    task_manager=self._manager,
                    log_samples=False,
                )
            except Exception as error:  # tasks contain code and data of others, which may raise anything
                raise DataError(
                    f"lm-evaluation-harness failed on {', '.join(self._tasks)}: {one_line(error)}",
                    meaning="most tasks are downloaded from the Hugging Face hub when they are first used",
                    fix="check that this machine reaches the hub, and HF_TOKEN for gated data",
                ) from error
        return found


def compare_harness(after: dict[str, Any], before: dict[str, Any] | None) -> list[Result]:
    """Return all scores of the harness, with intervals from its standard errors.

    Scores before and after are treated as independent, so intervals of changes are too wide.
    """
    results = []
    for task, scores in after["results"].items():
        earlier_scores = before["results"].get(task, {}) if before else {}
        for key, value in scores.items():
            name, _, variant = key.partition(",")
            if not variant or name.endswith("_stderr") or not isinstance(value, float | int):
                continue
            earlier = earlier_scores.get(key)
            change = None if earlier is None else value - earlier
            both = (scores, earlier_scores) if change is not None else (scores,)
            errors = [each.get(f"{name}_stderr,{variant}") for each in both]  # a text if the harness has none
            error = math.hypot(*(each if isinstance(each, float | int) else math.nan for each in errors))
            middle = value if change is None else change
            interval = (middle - _QUANTILE * error, middle + _QUANTILE * error)
            num_cases = after.get("n-samples", {}).get(task, {}).get("effective", 0)
            is_lower_better = after.get("higher_is_better", {}).get(task, {}).get(name) is False
            is_part = not is_lower_better and 0 <= value <= 1
            title = f"{task} {name}" + (f" ({variant})" if variant != "none" else "")
            results.append(Result(title, "", earlier, value, change, interval, num_cases, is_part, is_lower_better))
    return results
