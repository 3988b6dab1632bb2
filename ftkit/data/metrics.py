"""Metrics of completions, and the selection of metrics by the data."""

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
from typing import TYPE_CHECKING, Any

from ftkit.data.cases import Case
from ftkit.data.tasks import score_row
from ftkit.errors import DataError, NotFoundError, one_line

if TYPE_CHECKING:
    from ftkit.config.data import TaskFile

Call = tuple[str, Any]
"""A tool's name, and its arguments."""

_XML = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
_NAME_BEFORE = re.compile(r"(?:\[TOOL_CALLS\]\s*|functions\.)([\w.-]+)[^{}]*?(?=\{)")
"""Mistral's `[TOOL_CALLS]name[ARGS]{…}` and gpt-oss's `to=functions.name … {…}`."""
_DECODER = json.JSONDecoder()
_NGRAM = 4


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
    "calls": _CALLS,
    "exact_match": (Metric("exact_match", exact_match),),
    "repetition": (_REPETITION,),
}
"""Metrics of completions by their name in `--metrics` and recipes (`ftkit.config.recipe.SCORES`); the first one of
a result determines which examples changed."""


_NEEDS: dict[str, tuple[str, Callable[[Case], bool]]] = {
    "calls": ("tools or tool calls", lambda case: case.has_tools or bool(case.message and case.message.tool_calls)),
    "exact_match": ("a completion", lambda case: case.reference is not None),
    "repetition": ("an assistant turn", lambda _: True),
}
"""What a case must have for a score of each metric: in words, and as a test."""


def find_unmet_needs(names: Sequence[str], cases: Sequence[Case]) -> dict[str, str]:
    """Return the metrics that have no score for any case, each with what the cases lack."""
    return {
        name: need for name, (need, meets) in _NEEDS.items() if name in names and not any(meets(case) for case in cases)
    }


def choose_metrics(requested: Sequence[str], cases: Sequence[Case], task: TaskFile | None = None) -> list[Metric]:
    """Return the requested metrics; by default the task's or those that fit the rows, and repetition.

    Raises:
        NotFoundError: there is no such metric.
    """
    own = task.metrics if task else []
    names = list(requested) or [*_default_metrics(own, cases), "repetition"]
    metrics: list[Metric] = []
    for name in names:
        if name in METRICS:
            metrics += METRICS[name]
        elif task and name in own:
            metrics.append(Metric(name, partial(_score_by_task, task, name)))
        elif name != "loss":
            metrics.append(_import_metric(name, own))
    return metrics


def _default_metrics(own: Sequence[str], cases: Sequence[Case]) -> list[str]:
    found = [*own]
    if any(case.has_tools and case.message is not None for case in cases):
        found.append("calls")
    return found or ["exact_match"] * any(case.reference is not None for case in cases)


def _score_by_task(task: TaskFile, name: str, case: Case, completion: Completion) -> float | None:
    return score_row(task, name, case.columns, completion.text)


def _import_metric(name: str, own: Sequence[str]) -> Metric:
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


# --- Tool calls in completions ----------------------------------------------------------------------


def read_calls(text: str) -> list[Call]:
    """Return the calls in an assistant turn, special tokens included; none if there are none, or they are broken.

    Notations: Qwen's and Hermes's JSON in `<tool_call>`, Llama's and Mistral's JSON, a name before its arguments
    (newer Mistral, gpt-oss), and Qwen 3.5's `<function=…>`.
    """
    xml = [(name, _xml_arguments(body)) for name, body in _XML.findall(text)]
    return xml or _after_names(text) or _in_json(text)


def same_calls(left: list[Call], right: list[Call]) -> bool:
    """Tell whether both have the same calls with the same arguments, in any order."""
    left = list(left)
    for call in right:
        if call not in left:
            return False
        left.remove(call)
    return not left


def _xml_arguments(body: str) -> dict[str, Any]:
    return {name: _parse_value(value.strip("\n")) for name, value in _XML_PARAMETER.findall(body)}


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _after_names(text: str) -> list[Call]:
    found = ((match[1], _decode(text, match.end())) for match in _NAME_BEFORE.finditer(text))
    return [(name, arguments) for name, (arguments, _) in found if isinstance(arguments, dict)]


def _in_json(text: str) -> list[Call]:
    calls, place = [], 0
    while (place := text.find("{", place)) >= 0:
        value, end = _decode(text, place)
        call = _as_call(value)
        if call is not None:
            calls.append(call)
        place = max(end, place + 1)
    return calls


def _decode(text: str, place: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, place)
    except (ValueError, RecursionError):
        return None, place


def _as_call(value: Any) -> Call | None:
    if not isinstance(value, dict):
        return None
    function = value["function"] if isinstance(value.get("function"), dict) else value
    arguments = function.get("arguments", function.get("parameters"))
    if not isinstance(function.get("name"), str) or arguments is None:
        return None
    return function["name"], _parse_value(arguments) if isinstance(arguments, str) else arguments
