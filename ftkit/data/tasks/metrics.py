"""Metrics of completions, and the selection of metrics by the data."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ftkit.data.cases import Case
from ftkit.data.tasks.sql_score import execution_match, read_question
from ftkit.data.tasks.tool_calls import read_calls, same_calls
from ftkit.errors import DataError, NotFoundError, one_line

_NGRAM = 4
_VERDICT = re.compile(r"\bverdict\W+(\w+)", re.IGNORECASE)
SQL_COLUMNS = frozenset(("sql_prompt", "sql_context", "sql"))
"""The columns that the metric `sql` needs."""


@dataclass(frozen=True)
class Completion:
    """A completion with its reference.

    Attributes:
        tokens: tokens of the completion, without its end token.
        raw: text with special tokens, except the end token.
        reference: the assistant turn in the data; None for a prompt without completion.
        raw_reference: with special tokens.
    """

    tokens: Sequence[int]
    text: str
    raw: str
    reference: str | None
    raw_reference: str | None


Score = Callable[[Case, Completion], float | None]
"""A score from 0 to 1, or any number for a user's metric; None if the metric does not apply."""


@dataclass(frozen=True)
class Metric:
    """A metric of completions; `is_part` marks a fraction of 1, which is printed in percent."""

    name: str
    score: Score
    is_part: bool = True
    is_lower_better: bool = False


def repetition(_: Case, completion: Completion) -> float | None:
    """Return the fraction of repeated 4-grams of the completion's tokens: 0 without repetition."""
    grams = [tuple(completion.tokens[place : place + _NGRAM]) for place in range(len(completion.tokens) - _NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def exact_match(_: Case, completion: Completion) -> float | None:
    """Compare the texts, with every run of white space as one space."""
    return None if completion.reference is None else float(completion.text.split() == completion.reference.split())


def sql(case: Case, completion: Completion) -> float | None:
    """Execute the completion and the reference on the question's tables, and compare the rows."""
    if any(case.columns.get(name) is None for name in SQL_COLUMNS):
        return None
    return float(execution_match(read_question(case.columns), completion.text).matched)


def verdict(case: Case, completion: Completion) -> float | None:
    """Compare the word after `Verdict:` with the column `verdict`, or with that of the reference."""
    predicted, expected = _VERDICT.search(completion.text), case.columns.get("verdict")
    if not isinstance(expected, str):
        found = _VERDICT.search(completion.reference or "")
        if found is None:
            return None
        expected = found[1]
    return float(predicted is not None and predicted[1].lower() == expected.strip().lower())


def calls(case: Case, completion: Completion) -> float | None:
    """Compare calls by name and arguments, in any order, if the data has at least one."""
    return _compared(case, completion, at_least=1)


def call_names(case: Case, completion: Completion) -> float | None:
    """Compare calls only by name."""
    return _compared(case, completion, at_least=1, by_name=True)


def parallel_calls(case: Case, completion: Completion) -> float | None:
    """Compare calls by name and arguments if the data has several in one turn."""
    return _compared(case, completion, at_least=2)


def no_call(case: Case, completion: Completion) -> float | None:
    """Return whether the model calls no tool, for rows with tools whose reference calls none."""
    if not case.has_tools or case.message is None or case.message.tool_calls:
        return None
    return float(not read_calls(completion.raw))


def _compared(case: Case, completion: Completion, *, at_least: int, by_name: bool = False) -> float | None:
    if case.message is None or len(case.message.tool_calls) < at_least or completion.raw_reference is None:
        return None
    expected, predicted = read_calls(completion.raw_reference), read_calls(completion.raw)
    if sorted(name for name, _ in expected) != sorted(call.name for call in case.message.tool_calls):
        raise DataError(
            f"can't parse the tool calls that the chat template writes: {completion.raw_reference[:80]!r}",
            meaning="ftkit reads calls as JSON, as a name before JSON, and as <function=name>",
            fix="choose other metrics with --metrics, for example your own: module:function",
        )
    if by_name:
        expected, predicted = ([(name, None) for name, _ in each] for each in (expected, predicted))
    return float(same_calls(expected, predicted))


_CALLS = (
    Metric("calls", calls),
    Metric("call_names", call_names),
    Metric("parallel_calls", parallel_calls),
    Metric("no_call", no_call),
)
_REPETITION = Metric("repetition", repetition, is_lower_better=True)
METRICS: dict[str, tuple[Metric, ...]] = {
    "sql": (Metric("sql", sql),),
    "calls": _CALLS,
    "verdict": (Metric("verdict", verdict),),
    "exact_match": (Metric("exact_match", exact_match),),
    "repetition": (_REPETITION,),
}
"""Metrics of completions by their name in `--metrics` and recipes (`ftkit.config.recipe.SCORES`); the first one of
a result determines which examples changed."""


_NEEDS: dict[str, tuple[str, Callable[[Case], bool]]] = {
    "sql": (
        ", ".join(sorted(SQL_COLUMNS)),
        lambda case: all(case.columns.get(name) is not None for name in SQL_COLUMNS),
    ),
    "calls": ("tools or tool calls", lambda case: case.has_tools or bool(case.message and case.message.tool_calls)),
    "verdict": (
        "a column verdict or a completion with 'Verdict: …'",
        lambda case: (
            isinstance(case.columns.get("verdict"), str) or bool(case.message and _VERDICT.search(case.message.content))
        ),
    ),
    "exact_match": ("a completion", lambda case: case.reference is not None),
    "repetition": ("an assistant turn", lambda _: True),
}
"""What a case must have for a score of each metric: in words, and as a test."""


def find_unmet_needs(names: Sequence[str], cases: Sequence[Case]) -> dict[str, str]:
    """Return the metrics that have no score for any case, each with what the cases lack."""
    return {name: _NEEDS[name][0] for name in names if not any(_NEEDS[name][1](case) for case in cases)}


def choose_metrics(requested: Sequence[str], cases: Sequence[Case]) -> list[Metric]:
    """Return the requested metrics; by default those of the data's task, and repetition.

    Raises:
        NotFoundError: there is no such metric.
    """
    names = list(requested) or [*_task_of(cases), "repetition"]
    return [metric for name in names if name != "loss" for metric in METRICS.get(name) or (_import_metric(name),)]


def _task_of(cases: Sequence[Case]) -> list[str]:
    found = []
    if any(case.columns.keys() >= SQL_COLUMNS for case in cases):
        found.append("sql")
    if any(case.has_tools and case.message is not None for case in cases):
        found.append("calls")
    if any(isinstance(case.columns.get("verdict"), str) for case in cases):
        found.append("verdict")
    return found or ["exact_match"] * any(case.reference is not None for case in cases)


def _import_metric(name: str) -> Metric:
    """Import a user's metric: a function of a row's columns and the text of a completion."""
    module_name, _, function_name = name.partition(":")
    if not function_name:
        raise NotFoundError(
            f"there is no metric '{name}'",
            meaning=f"known: loss, {', '.join(METRICS)}",
            fix="correct --metrics, or give your own function as module:function",
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise NotFoundError(
            f"can't import the metric '{name}': {one_line(error)}",
            meaning="modules are looked for in the current folder and among installed packages",
            fix="correct the name: module:function",
        ) from error
    return Metric(name, partial(_score_by, function, name), is_part=False)


def _score_by(function: Callable[..., object], name: str, case: Case, completion: Completion) -> float:
    try:
        score = float(function(dict(case.columns), completion.text))  # type: ignore[arg-type] # it may return anything
    except Exception as error:  # user code may raise anything
        raise DataError(
            f"the metric '{name}' failed: {type(error).__name__}: {one_line(error)}",
            meaning="it is called with a row's columns and the completion, and returns a number",
            fix="correct the function",
        ) from error
    if not math.isfinite(score):
        raise DataError(f"the metric '{name}' returned {score}", fix="return a finite number")
    return score
