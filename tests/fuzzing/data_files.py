"""Data files: JSON Lines, similar formats, and other encodings."""

from __future__ import annotations

import codecs
import json
from typing import TYPE_CHECKING

from ftkit.config.data import DataSpec
from ftkit.config.data_sources import FilesSource
from ftkit.data.row_formats import DETECTION_ROWS, read_example, resolve_format
from ftkit.data.rows import errors_at
from ftkit.data.selection import read_rows
from ftkit.errors import DataError
from fuzzing.area import Area, Case
from fuzzing.mutate import damaged_bytes, damaged_json

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

    from ftkit.data.rows import Row

_ROWS = (
    {"question": "How many?", "answer": "SELECT 1", "sql_prompt": "How many?", "sql_context": "", "sql": "SELECT 1"},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}], "answer": "x"},
    {"messages": [{"from": "human", "value": "\U0001f600"}, {"from": "gpt", "value": "a\u2028b"}], "question": None},
    {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "weight": 1,
         "tool_calls": [{"id": "c", "type": "function", "function": {"name": "w", "arguments": '{"city": "Ulm"}'}}]},
        {"role": "tool", "content": "12", "tool_call_id": "c"}, {"role": "assistant", "content": "<|im_end|>12"}],
     "tools": [{"type": "function", "function": {"name": "w", "parameters": {"$ref": "#/parameters"}}}]},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": '{"name": "w"}'},
                       {"from": "observation", "value": "r"}], "tools": '[{"name": "w"}]', "system": "s"},
    {"instruction": "q", "input": "", "output": "a", "history": [["q", "a"]], "context": "c", "response": "r"},
    {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}], "text": "t"},
)  # fmt: skip
_LINES = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in _ROWS * 3)
_TABLE = b'question;"answer"\nHow many?,"SELECT ""a"",\n1"\n\t;;\r\n'
_PIECES = (
    b"\n",
    b"\r\n",
    b"\x85",
    "\u2028".encode(),
    b"\\ud83d",
    b"\xef\xbb\xbf",
    b'"',
    b"NaN",
    b"[" * 99,
    b"1e999",
    b"{}\n",
)
_ENCODINGS = ("utf-16", "utf-16-be", "utf-32", "utf-8-sig", "utf-7")
_FORMATS = (
    {"kind": "prompt-completion", "prompt": "{question}", "completion": "{answer}"},
    {"kind": "jinja", "prompt": "{{ question }}", "completion": "{{ answer }}"},
    "auto", "messages", "sharegpt", "alpaca", "dolly", "prompt-completion", "text",
)  # fmt: skip
_IGNORED = tuple({name for row in _ROWS for name in row} - {"messages", "conversations", "tools"})
_SPECS = tuple(
    DataSpec.model_validate({"source": {"kind": "files", "train": "/x"}, "format": form, "ignore_columns": ignored})
    for form in _FORMATS
    for ignored in ((), _IGNORED)
)


def _make(rng: random.Random) -> Case:
    data = rng.choice((_LINES, _LINES, _LINES, _TABLE, b"[" + b",".join(_LINES.splitlines()) + b"]"))
    if rng.random() < 0.1:
        data = data.decode().encode(rng.choice(_ENCODINGS))
    if rng.random() < 0.1:
        data = codecs.BOM_UTF8 + data
    return {"train.jsonl": damaged_json(rng, data) if data is _LINES else damaged_bytes(rng, data, _PIECES)}


def _run(case: Case, folder: Path) -> bool:
    path = folder / "train.jsonl"
    path.write_bytes(case["train.jsonl"])
    try:
        taken = read_rows(DataSpec(source=FilesSource(kind="files", train=str(path), num_heldout=1)))
        rows = [row for _, split, raw in taken if split == "train" and (row := raw.parse())]
    except DataError as error:
        _check_message(error, path)
        return False
    num_taken = 0
    for data in _SPECS:
        try:
            form = resolve_format(data.format, rows[:DETECTION_ROWS])
        except DataError as error:
            _check_length(error)
            continue
        num_taken += sum(_takes(row, lambda row: read_example(row.columns, data, form), path) for row in rows)  # noqa: B023
    return num_taken > 0


def _takes(row: Row, use: Callable[[Row], object], path: Path) -> bool:
    try:
        with errors_at(row):
            use(row)
    except DataError as error:
        _check_message(error, path)
        return False
    return True


def _check_message(error: DataError, path: Path) -> None:
    assert str(path) in error.what or "num_train + num_heldout" in error.what
    _check_length(error)


def _check_length(error: DataError) -> None:
    assert len(str(error)) < 2000


DATA = Area("data", _make, _run)
