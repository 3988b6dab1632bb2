"""Score completions, and select the metrics that fit the data."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.config.recipe import SCORES
from ftkit.data.cases import Case
from ftkit.data.tasks import score_row
from ftkit.errors import DataError, NotFoundError, one_line

if TYPE_CHECKING:
    from ftkit.config.data_sources import TaskFile

Call = tuple[str, object]  # a tool's name, and its arguments

_XML = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
_NAME_BEFORE = re.compile(r"(?:\[TOOL_CALLS\]\s*|functions\.)([\w.-]+)[^{}]*?(?=\{)")
"""Mistral's `[TOOL_CALLS]name[ARGS]{…}` and gpt-oss's `to=functions.name … {…}`."""
_DECODER = json.JSONDecoder()
_NGRAM = 4


@dataclass(frozen=True)
class Completion:
    """Tokens and text of a completion without its end token, and its reference if the data has one.

    `raw` and `raw_reference` keep special tokens.
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
    """Return whether the texts are equal, with each run of white space collapsed to one space."""
    return None if completion.reference is None else float(completion.text.split() == completion.reference.split())


def no_call(case: Case, completion: Completion) -> float | None:
    """Return whether the model calls no tool, for rows with tools whose reference calls none."""
    if not case.has_tools or case.message is None or case.message.tool_calls:
        return None
    return float(not read_calls(completion.raw))


def _compare_calls(at_least: int, case: Case, completion: Completion, *, by_name: bool = False) -> float | None:
    """Compare calls in any order; None if the data's turn has fewer than `at_least` calls."""
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
        return float(sorted(name for name, _ in expected) == sorted(name for name, _ in predicted))
    for call in predicted:
        if call not in expected:
            return 0.0
        expected.remove(call)
    return float(not expected)


_METRICS = (
    Metric("calls", partial(_compare_calls, 1)), Metric("call_names", partial(_compare_calls, 1, by_name=True)),
    Metric("parallel_calls", partial(_compare_calls, 2)), Metric("no_call", no_call),
    Metric("exact_match", exact_match), Metric("repetition", repetition, is_lower_better=True),
)  # fmt: skip
METRICS = {name: [each for each in _METRICS if each.name in scores] for name, scores in SCORES.items()}
"""Metrics of completions by their name in `--metrics` and recipes. The first metric of a result decides which examples
count as changed."""


def choose_metrics(requested: Sequence[str], cases: Sequence[Case], task: TaskFile | None = None) -> list[Metric]:
    """Return the requested metrics. Default: the task's, `calls` with tools, else `exact_match`; and `repetition`."""
    own = task.metrics if task else []
    default = [*own]
    if any(case.has_tools and case.message is not None for case in cases):
        default.append("calls")
    if not default and any(case.reference is not None for case in cases):
        default.append("exact_match")
    metrics: list[Metric] = []
    for name in requested or (*default, "repetition"):
        if name in METRICS:
            metrics += METRICS[name]
        elif task and name in own:
            metrics.append(Metric(name, partial(_score_by_task, task, name)))
        elif name != "loss":
            metrics.append(_user_metric(name, own))
    return metrics


def _score_by_task(task: TaskFile, name: str, case: Case, completion: Completion) -> float | None:
    return score_row(task, name, case.columns, completion.text)


def _user_metric(name: str, own: Sequence[str]) -> Metric:
    """Import a user's metric: a function of a row's columns and the text of a completion."""
    module_name, _, function_name = name.partition(":")
    if not function_name:
        raise NotFoundError(
            f"there is no metric '{name}'",
            meaning=f"known: {', '.join(['loss', *METRICS, *own])}",
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

    def score(case: Case, completion: Completion) -> float:
        try:
            found = float(function(dict(case.columns), completion.text))
        except Exception as error:  # user code may raise anything
            raise DataError(
                f"the metric '{name}' failed: {type(error).__name__}: {one_line(error)}",
                meaning="it is called with a row's columns and the completion, and returns a number",
                fix="correct the function",
            ) from error
        if not math.isfinite(found):
            raise DataError(f"the metric '{name}' returned {found}", fix="return a finite number")
        return found

    return Metric(name, score, is_part=False)


def read_calls(text: str) -> list[Call]:
    """Return the calls in an assistant turn with special tokens; empty if it has none or they can't be parsed.

    Notations: Qwen's and Hermes's JSON in `<tool_call>`, Llama's and Mistral's JSON, a name before its arguments
    (newer Mistral, gpt-oss), and Qwen 3.5's `<function=…>`.
    """
    xml: list[Call] = [
        (name, {key: parse_value(value.strip("\n")) for key, value in _XML_PARAMETER.findall(body)})
        for name, body in _XML.findall(text)
    ]
    decoded = ((match[1], _decode(text, match.end())[0]) for match in _NAME_BEFORE.finditer(text))
    after_names: list[Call] = [(name, arguments) for name, arguments in decoded if isinstance(arguments, dict)]
    return xml or after_names or _in_json(text)


def parse_value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _in_json(text: str) -> list[Call]:
    calls, place = [], 0
    while (place := text.find("{", place)) >= 0:
        value, end = _decode(text, place)
        place = max(end, place + 1)
        if not isinstance(value, dict):
            continue
        function = value["function"] if isinstance(value.get("function"), dict) else value
        arguments = function.get("arguments", function.get("parameters"))
        if isinstance(function.get("name"), str) and arguments is not None:
            calls.append((function["name"], parse_value(arguments) if isinstance(arguments, str) else arguments))
    return calls


def _decode(text: str, place: int) -> tuple[object, int]:
    try:
        return _DECODER.raw_decode(text, place)
    except (ValueError, RecursionError):
        return None, place
