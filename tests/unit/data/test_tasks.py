"""A recipe's task: read and checked when the recipe is loaded, run only when rows are needed."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING

import pytest

from ftkit.config.context import Context
from ftkit.config.load import load_recipe, override_recipe
from ftkit.data.cases import Case
from ftkit.data.completion_metrics import Completion, choose_metrics
from ftkit.data.conversations import Conversation
from ftkit.data.row_formats import read_example
from ftkit.data.selection import first_rows, read_rows
from ftkit.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pathlib import Path

OWN = """
from dataclasses import dataclass

@dataclass
class Sum:
    a: int
    b: int

def generate(seed: int, num_train: int, num_heldout: int, *, largest: int = 9):
    return [{"a": n % largest, "b": seed} for n in range(num_train)], [{"a": 0, "b": 0}] * num_heldout

def prompt(row):
    return f"{row['a']} + {row['b']} ="

def completion(row):
    found = Sum(**row)
    return str(found.a + found.b)

def is_right(row, completion):
    return None if "a" not in row else completion.strip() == str(row["a"] + row["b"])

def too_much(row, completion):
    return 7

def _hidden(row, completion):
    return 1 / 0
"""


@pytest.fixture
def project(tmp_path: Path) -> Context:
    for folder in ("recipes", "tasks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tasks/sums.py").write_text(OWN)
    (tmp_path / "recipes/sums.yaml").write_text(
        "extends: demo\nname: sums\ndata:\n  task: ../tasks/sums.py\n  format: task\n"
        "  source: {kind: generated, num_train: 3, num_heldout: 1, options: {largest: 2}}\n"
        "evaluation: {generation: {metrics: [is_right]}}\n"
    )
    return Context(tmp_path, tmp_path / "user", {})


def test_rows_prompts_and_metrics_are_those_of_the_task(project: Context) -> None:
    data = load_recipe("sums", project).data
    (row,) = first_rows(data, 0, 5)
    example = read_example(row.columns, data, data.format)
    assert isinstance(example, Conversation)
    assert [turn.content for turn in example.messages] == ["0 + 1 =", "1"]
    case = Case(0, {"a": 2, "b": 3}, [1], [2])
    texts = [Completion([], text, text, "5", "5") for text in ("5", "6")]
    (metric,) = choose_metrics(["is_right"], [case], data.task)
    assert [metric.score(case, each) for each in texts] == [1, 0]
    assert metric.score(Case(0, {}, [1]), texts[0]) is None
    assert [each.name for each in choose_metrics([], [case], data.task)] == ["is_right", "too_much", "repetition"]
    (metric,) = choose_metrics(["too_much"], [case], data.task)
    with pytest.raises(DataError, match="'too_much' returned 7"):
        metric.score(case, texts[0])


def test_rows_that_are_read_again_are_not_generated_again(project: Context) -> None:
    counted = OWN.replace("    return [{", "    print('generated')\n    return [{")
    (project.project / "tasks/sums.py").write_text(counted)
    data = load_recipe("sums", project).data
    with redirect_stdout(StringIO()) as printed:
        assert [*read_rows(data)] == [*read_rows(data)]
        assert printed.getvalue() == "generated\n"
        [*read_rows(data.model_copy(update={"source": data.source.model_copy(update={"seed": 7})}))]  # type: ignore[union-attr]
    assert printed.getvalue() == "generated\n" * 2


def test_a_loaded_recipe_needs_the_file_no_more(project: Context) -> None:
    values = load_recipe("sums", project).model_dump(mode="json")
    (project.project / "tasks/sums.py").unlink()
    assert first_rows(override_recipe(values, ["data.source.seed=4"]).spec.data, 0, 1)[0].columns == {"a": 0, "b": 4}


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        (None, "sums.py", "No such file"),
        ("def generate(:", "sums.py:1:", "not Python"),
        ("x = 1\n\0", "sums.py:", "not Python"),
        (OWN.replace("def prompt", "def ask"), "sums.py:", "'prompt'"),
        (OWN.replace("largest", "biggest"), "sums.py:9:", "no option largest"),
        (OWN.replace("seed: int, ", ""), "sums.py:9:", "no parameter seed"),
        (b"\xff", "sums.py", "not UTF-8"),
    ],
)
def test_a_task_that_cannot_be_used_is_reported_when_the_recipe_is_loaded(
    project: Context, text: str | bytes | None, place: str, reason: str
) -> None:
    path = project.project / "tasks/sums.py"
    path.unlink()
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as failure:
        load_recipe("sums", project)
    problem = str(failure.value)
    assert "recipes/sums.yaml:4" in problem
    assert place in problem
    assert reason in problem


def test_loading_a_recipe_does_not_run_its_task(project: Context) -> None:
    path = project.project / "tasks/sums.py"
    path.write_text(f"{OWN}\nraise RuntimeError('run')\n")
    data = load_recipe("sums", project).data
    with pytest.raises(DataError, match=r"sums\.py:\d+: .*RuntimeError: run"):
        first_rows(data, 0, 1)


def test_a_generator_and_a_format_of_a_task_need_one(project: Context) -> None:
    with pytest.raises(ConfigError, match=r"set data\.task"):
        load_recipe("sums", project, ["data.task=null"])
