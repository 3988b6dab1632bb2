"""Rows in the formats of the reference systems' datasets, encoded with the shipped recipes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ftkit.config.context import Context
from ftkit.config.load import load_recipe
from ftkit.data.encoding import RowEncoder
from ftkit.data.packing import IGNORED
from ftkit.data.row_formats import resolve_format
from ftkit.data.rows import Row
from ftkit.data.tokenizers import learn_tokenizer

NOWHERE = Context(Path("/nowhere"), Path("/nowhere"), {})
GRETEL = {
    "id": 5097, "domain": "forestry", "domain_description": "All about trees.", "sql_complexity": "single join",
    "sql_complexity_description": "one join", "sql_task_type": "analytics", "sql_task_type_description": "reports",
    "sql_prompt": "How much timber?", "sql_context": "CREATE TABLE timber (volume INT);",
    "sql": "SELECT SUM(volume) FROM timber;", "sql_explanation": "It sums the volume.",
}  # fmt: skip
DOLLY = {"instruction": "When was it?", "context": "It was in 1999.", "response": "In 1999.", "category": "closed_qa"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
XLAM_TURNS = [("system", "You can call: weather."), ("human", "Weather in Ulm?"), ("gpt", CALL)]
XLAM_CALLS = [("human", "Weather in Ulm?"), ("function_call", '{"name": "weather", "arguments": {"city": "Ulm"}}')]
HERMES = [*XLAM_TURNS, ("tool", "<tool_response>\n12 C\n</tool_response>"), ("gpt", "It has 12 C.")]


def sharegpt(turns: list[tuple[str, str]], **columns: object) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": value} for role, value in turns]} | columns


TOOLS = '[{"name": "weather", "description": "Weather", "parameters": {"city": {"type": "str"}}}]'
CASES = [
    ("gemma3-12b-sql-qlora", "gemma", GRETEL, None),
    ("gemma3-1b-dolly-lora", "gemma", DOLLY, "In 1999.<end_of_turn>"),
    ("gemma3-1b-dolly-full", "gemma", DOLLY | {"context": ""}, "In 1999.<end_of_turn>"),
    ("llama3.3-70b-lora", "llama3", sharegpt(XLAM_TURNS), f"{CALL}<|eot_id|>"),
    ("llama3.3-70b-full", "llama3", sharegpt(XLAM_CALLS, tools=TOOLS, id=1),
     '{"name": "weather", "parameters": {"city": "Ulm"}}<|eot_id|>'),
    ("qwen3-8b-tools-full", "chatml",
     sharegpt(HERMES, id="a", tools="[]", category="c", subcategory="s", task="t"),
     f"{CALL}<|im_end|>It has 12 C.<|im_end|>"),
]  # fmt: skip


@cache
def tokenizer_for(template: str) -> Any:
    return learn_tokenizer(["weather"], 300, template)


@pytest.mark.parametrize(("recipe", "template", "columns", "trained"), CASES, ids=[case[0] for case in CASES])
def test_rows_of_the_reference_systems_are_encoded_by_the_shipped_recipes(
    recipe: str, template: str, columns: dict[str, Any], trained: str | None
) -> None:
    data, tokenizer = load_recipe(recipe, NOWHERE).data, tokenizer_for(template)
    form = resolve_format(data.format, [Row(columns, "f:1")])
    (documents,) = RowEncoder.of(tokenizer, data, form, len(tokenizer)).encode([Row(columns, "f:1")])
    assert isinstance(documents, list), documents
    (document,) = documents
    labels = tokenizer.decode(document.labels[document.labels != IGNORED])
    if trained is None:  # all tokens
        assert document.num_targets == len(document.tokens) - 1
        assert all(columns[name] in labels for name in ("sql_context", "sql_prompt", "sql"))
        assert "forestry" not in labels
    else:
        assert labels == trained
