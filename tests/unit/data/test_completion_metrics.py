from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.data.cases import Case
from ftkit.data.completion_metrics import Completion, choose_metrics, read_calls
from ftkit.data.conversations import Message, ToolCall
from ftkit.errors import DataError, NotFoundError

if TYPE_CHECKING:
    from pathlib import Path

PARIS, ROME = ("weather", {"city": "Paris", "days": 2}), ("weather", {"city": "Rome", "days": 1})


def as_qwen(*calls: tuple[str, Any]) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)


NOTATIONS = {
    "Qwen 3": as_qwen(PARIS, ROME),
    "Llama 3": '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}; '
    '{"name": "weather", "parameters": {"city": "Rome", "days": 1}}',
    "Mistral": f"[TOOL_CALLS] {json.dumps([{'name': name, 'arguments': given} for name, given in (PARIS, ROME)])}",
    "newer Mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 2}'
    '[TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 1}',
    "gpt-oss": "".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(given)}<|call|>"
        for name, given in (PARIS, ROME)
    ),
    "Qwen 3.5": "".join(
        f"<tool_call>\n<function={name}>\n<parameter=city>\n{given['city']}\n</parameter>\n<parameter=days>\n"
        f"{given['days']}\n</parameter>\n</function>\n</tool_call>"
        for name, given in (PARIS, ROME)
    ),
}


@pytest.mark.parametrize("text", NOTATIONS.values(), ids=NOTATIONS)
def test_parallel_calls_are_read_in_each_notation(text: str) -> None:
    assert read_calls(text) == [PARIS, ROME]


@pytest.mark.parametrize("text", ["", "It rains.", '{"city": "Paris"}', '<tool_call>{"name": "weather", "argu', "{{{["])
def test_text_and_malformed_calls_are_not_calls(text: str) -> None:
    assert read_calls(text) == []


def scores(case: Case, answer: str, reference: str | None = None, metrics: str = "") -> dict[str, float | None]:
    given = Completion(answer.split(), answer, answer, reference, reference)  # type: ignore[arg-type] # with words as tokens
    return {each.name: each.score(case, given) for each in choose_metrics(metrics.split(), [case])}


def with_calls(*calls: tuple[str, Any]) -> Case:
    message = Message("assistant", "", tool_calls=tuple(ToolCall(*call) for call in calls))
    return Case(0, {}, [1], [2], message, has_tools=True)


@pytest.mark.parametrize(
    ("wanted", "said", "expected"),
    [
        ([PARIS, ROME], [ROME, PARIS], (1, 1, 1, None)),
        ([PARIS, ROME], [PARIS], (0, 0, 0, None)),
        ([PARIS], [ROME], (0, 1, None, None)),
        ([PARIS], [PARIS, PARIS], (0, 0, None, None)),
        ([PARIS], [], (0, 0, None, None)),
        ([], [], (None, None, None, 1)),
        ([], [PARIS], (None, None, None, 0)),
    ],
)
def test_calls_are_scored_by_name_arguments_count_and_correct_absence(
    wanted: list[Any], said: list[Any], expected: tuple[float | None, ...]
) -> None:
    found = scores(with_calls(*wanted), as_qwen(*said), as_qwen(*wanted))
    assert tuple(found[name] for name in ("calls", "call_names", "parallel_calls", "no_call")) == expected


def test_tool_calls_that_cannot_be_parsed_are_an_error() -> None:
    with pytest.raises(DataError, match="call weather"):
        scores(with_calls(PARIS), "", "call weather with Paris")


def test_repetition_is_the_fraction_of_repeated_4_grams() -> None:
    assert scores(Case(0, {}, [1]), "a b c d e f g")["repetition"] == 0
    assert scores(Case(0, {}, [1]), "a b")["repetition"] == 0
    assert scores(Case(0, {}, [1]), "a " * 13)["repetition"] == 0.9


def test_a_custom_metric_is_called_and_its_failures_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_metrics.py").write_text("def short(row, answer):\n    return len(answer) < row['limit']\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert scores(Case(0, {"limit": 3}, [1]), "ab", metrics="my_metrics:short") == {"my_metrics:short": 1}
    with pytest.raises(DataError, match="KeyError"):
        scores(Case(0, {}, [1]), "ab", metrics="my_metrics:short")
    for name in ("my_metrics:long", "no_module:short", "accuracy"):
        with pytest.raises(NotFoundError, match=name):
            scores(Case(0, {}, [1]), "ab", metrics=name)
