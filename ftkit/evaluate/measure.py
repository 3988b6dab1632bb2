"""Evaluate a model, and compare two models on the same rows."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from ftkit.data.cases import EvaluationSet, make_evaluation_set, read_evaluation_rows
from ftkit.data.metrics import Completion, Metric, choose_metrics
from ftkit.data.store import PreparedData
from ftkit.errors import plural
from ftkit.evaluate.bootstrap import Interval, Ratio, paired_interval
from ftkit.evaluate.ranks import Ranks
from ftkit.runs.records import EvaluationRecord, SourceLoss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ftkit.data.encoding import Document
    from ftkit.evaluate.load import MeasurableModel
    from ftkit.evaluate.source import ModelSource, Target
    from ftkit.planning.plan import RunPlan

ALONE = Ranks()
_TOKENS_PER_FORWARD = 8192
"""Maximum tokens of a forward pass, whose logits are all in memory."""


@dataclass(frozen=True)
class Measured:
    """A model's measurements.

    Attributes:
        loss: float64 [rows, 3]: summed loss, number of labels, and how many of these are the most probable token.
        completions: the completion of each case.
        scores: the score of each case, by metric; None if a metric does not apply.
    """

    loss: NDArray[np.float64]
    completions: list[Completion]
    scores: dict[str, list[float | None]]


@dataclass(frozen=True)
class MeasureSettings:
    """Settings of an evaluation.

    Attributes:
        metrics: metrics of completions; selected by the data if empty.
        limit: maximum number of rows.
        max_new_tokens: maximum tokens per completion.
        batch_size: completions per batch.
        file: rows to measure on. The validation split if None.
    """

    metrics: tuple[str, ...] = ()
    limit: int = 200
    max_new_tokens: int = 128
    batch_size: int = 16
    file: str | None = None


@dataclass(frozen=True)
class Measurements:
    """The tokenizer of a model, its data, and the measurements; `before` are those of the model before training."""

    tokenizer: PreTrainedTokenizerBase
    data: EvaluationSet
    metrics: list[Metric]
    after: Measured
    before: Measured | None


@dataclass(frozen=True)
class Result:
    """A metric, before and after.

    Attributes:
        source: source of the rows; empty for all rows.
        interval: 95% confidence interval of the change; of `after` if there is no `before`.
        num_cases: number of rows for losses, of completions for other metrics.
    """

    metric: str
    source: str
    before: float | None
    after: float
    change: float | None
    interval: Interval
    num_cases: int
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


def evaluation_set(
    model: MeasurableModel, plan: RunPlan | None, settings: MeasureSettings, report: Callable[[str], None]
) -> tuple[EvaluationSet, list[Metric]]:
    """Read and encode the rows of an evaluation, and select the metrics of completions.

    Args:
        model: the model, or one with the same tokenizer.
        plan: the plan of the model's run, if it has one.
        settings: rows and metrics.
        report: called with messages about skipped rows.

    Raises:
        DataError: there are no usable rows.
        NotFoundError: there is no such metric.
    """
    prepared = PreparedData(plan.data_directory) if plan else None
    rows = read_evaluation_rows(prepared, Path(settings.file) if settings.file else None, settings.limit)
    data = make_evaluation_set(model.input, rows, plan.recipe.data if plan else None, report)
    return data, choose_metrics(settings.metrics, data.cases, plan.recipe.data.task if plan else None)


def measure_target(
    target: Target,
    settings: MeasureSettings,
    load: Callable[[ModelSource], MeasurableModel],
    report: Callable[[str], None],
    ranks: Ranks = ALONE,
) -> Measurements:
    """Measure a model, and the model before training on the same rows if there is one. Collective.

    Raises:
        DataError: no rows can be used, or a metric failed.
        NotFoundError: there is no such metric.
    """
    model = load(target.source)
    tokenizer = model.tokenizer
    data, metrics = evaluation_set(model, target.plan, settings, report)
    report(
        f"measuring {plural(len(data.rows), 'row')}" + (f", {plural(len(data.cases), 'completion')}" if metrics else "")
    )
    after, before = measure(model, data, metrics, settings, ranks), None
    for metric in metrics if settings.metrics else ():
        if all(score is None for score in after.scores[metric.name]):
            report(f"{metric.name} applies to none of these rows")
    model.close()
    if target.before and target.before != target.source:
        del model  # only one model at a time is in memory
        model = load(target.before)
        before = measure(model, data, metrics, settings, ranks)
        model.close()
    return Measurements(tokenizer, data, metrics, after, before)


def measure(
    model: MeasurableModel,
    data: EvaluationSet,
    metrics: Sequence[Metric],
    settings: MeasureSettings,
    ranks: Ranks = ALONE,
) -> Measured:
    """Compute losses, and generate and score completions if there are metrics for them. Collective.

    Batches are the same for any number of ranks, and so are the results.

    Raises:
        DataError: a metric failed.
    """
    loss = np.zeros((len(data.rows), 3))
    batches = [data.documents] if model.schedules else list(_batches(data.documents))
    own = [model.losses([document for _, document in batch]) for batch in ranks.share(batches)]
    for batch, sums in zip(batches, ranks.merge(own), strict=True):
        for (number, _), of_document in zip(batch, sums, strict=True):
            loss[number] += of_document
    completions = _complete(model, data, settings, ranks) if metrics else []
    scores = {
        metric.name: [metric.score(case, completion) for case, completion in zip(data.cases, completions, strict=True)]
        for metric in metrics
    }
    return Measured(loss, completions, scores)


def _batches(documents: Sequence[tuple[int, Document]]) -> Iterator[list[tuple[int, Document]]]:
    """Yield documents of similar lengths, as many as fit in a forward pass."""
    batch: list[tuple[int, Document]] = []
    for each in sorted(documents, key=lambda found: len(found[1].tokens)):
        if batch and len(each[1].tokens) * (len(batch) + 1) > _TOKENS_PER_FORWARD:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def _complete(model: MeasurableModel, data: EvaluationSet, settings: MeasureSettings, ranks: Ranks) -> list[Completion]:
    config = model.generation.greedy(model.tokenizer, settings.max_new_tokens)
    order = sorted(range(len(data.cases)), key=lambda number: len(data.cases[number].prompt))
    batch_size = max(1, len(order)) if model.schedules else settings.batch_size
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    own = [model.complete([data.cases[number].prompt for number in batch], config) for batch in ranks.share(batches)]
    completions = {
        number: completion
        for batch, completed in zip(batches, ranks.merge(own), strict=True)
        for number, completion in zip(batch, completed, strict=True)
    }
    return [
        model.generation.to_completion(model.tokenizer, completions[number], case.reference)
        for number, case in enumerate(data.cases)
    ]


# --- Comparison ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """A metric of both models as ratios over rows."""

    name: str
    source: str
    after: Ratio
    before: Ratio | None
    num_cases: int
    is_part: bool = False
    is_lower_better: bool = False
    is_exponential: bool = False


def compare(
    data: EvaluationSet, metrics: Sequence[Metric], after: Measured, before: Measured | None, seed: int
) -> list[Result]:
    """Return all metrics with their intervals: losses of all rows and of each source, then those of completions."""
    return [_result(column, seed) for column in _columns(data, metrics, after, before)]


def _columns(
    data: EvaluationSet, metrics: Sequence[Metric], after: Measured, before: Measured | None
) -> Iterator[_Column]:
    sources = list(dict.fromkeys(data.sources))
    for source in ["", *(sources if len(sources) > 1 else [])]:
        chosen = np.array([source in ("", each) for each in data.sources])
        losses = [None if each is None else each.loss * chosen[:, None] for each in (after, before)]
        if losses[0] is None or not losses[0][:, 1].sum():
            continue
        for name, place, is_part, is_lower_better in (
            ("loss", 0, False, True), ("perplexity", 0, False, True), ("token_accuracy", 2, True, False),
        ):  # fmt: skip
            ratios = [None if each is None else Ratio(each[:, place], each[:, 1]) for each in losses]
            if ratios[0] is not None:
                num_rows = int((losses[0][:, 1] > 0).sum())
                is_exponential = name == "perplexity"
                yield _Column(name, source, ratios[0], ratios[1], num_rows, is_part, is_lower_better, is_exponential)
    rows = np.array([case.number for case in data.cases], np.int64)
    for metric in metrics:
        own = _ratio(rows, after.scores[metric.name], len(data.rows))
        num_cases = int(own.denominators.sum())
        if num_cases:
            earlier = _ratio(rows, before.scores[metric.name], len(data.rows)) if before else None
            yield _Column(metric.name, "", own, earlier, num_cases, metric.is_part, metric.is_lower_better)


def _ratio(rows: NDArray[np.int64], scores: Sequence[float | None], num_rows: int) -> Ratio:
    applies = np.array([score is not None for score in scores], np.float64)
    values = np.array([score or 0.0 for score in scores], np.float64)
    sums = (np.bincount(rows, each, num_rows).astype(np.float64) for each in (values, applies))
    return Ratio(*sums)


def _result(column: _Column, seed: int) -> Result:
    # exp(loss) overflows above 709.
    shown = (lambda values: np.exp(np.minimum(values, 700.0))) if column.is_exponential else np.asarray
    value = float(shown(column.after.value))
    if column.before is None:
        earlier, interval = None, paired_interval((column.after,), shown, seed)
    else:
        earlier = float(shown(column.before.value))
        pair = (column.after, column.before)
        interval = paired_interval(pair, lambda after, before: shown(after) - shown(before), seed)
    change = None if earlier is None else value - earlier
    return Result(
        column.name, column.source, earlier, value, change, interval, column.num_cases, column.is_part,
        column.is_lower_better,
    )  # fmt: skip


def changed_examples(
    tokenizer: PreTrainedTokenizerBase, data: EvaluationSet, metric: Metric, after: Measured, before: Measured
) -> list[Example]:
    """Return the cases whose score changed, largest gains first."""
    sign = -1 if metric.is_lower_better else 1
    found = []
    for number, case in enumerate(data.cases):
        new, old = after.scores[metric.name][number], before.scores[metric.name][number]
        if new is None or old is None or new == old:
            continue
        completion = after.completions[number]
        prompt = str(tokenizer.decode(case.prompt, skip_special_tokens=True)).strip()
        earlier = before.completions[number].raw if metric.name.startswith("call") else before.completions[number].text
        later = completion.raw if metric.name.startswith("call") else completion.text
        where = data.rows[case.number].where
        found.append(Example(metric.name, where, prompt, completion.reference, earlier, later, sign * (new - old)))
    return sorted(found, key=lambda example: -example.change)


# --- One model -----------------------------------------------------------------------------------


def to_record(step: int, data: EvaluationSet, metrics: Sequence[Metric], measured: Measured) -> EvaluationRecord:
    """Return a checkpoint's measurements as a record of its run."""
    values = {(column.name, column.source): column.after.value for column in _columns(data, metrics, measured, None)}
    loss = values.get(("loss", ""), math.nan)
    targets = {source: 0 for _, source in values if source}
    for source, (_, num_targets, _) in zip(data.sources, measured.loss.tolist(), strict=True):
        if source in targets:
            targets[source] += int(num_targets)
    sources = {source: SourceLoss(values["loss", source], count) for source, count in targets.items()}
    scores = {metric.name: values[metric.name, ""] for metric in metrics if (metric.name, "") in values}
    return EvaluationRecord(
        time.time(), step, "job", loss, math.exp(min(loss, 700.0)), scores.get("sql"), (), sources, scores
    )
