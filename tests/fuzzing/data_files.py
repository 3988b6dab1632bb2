"""Files of examples: JSON Lines, what is taken for it, and other encodings."""

from __future__ import annotations

import codecs
import json
from typing import TYPE_CHECKING

from ftkit.config.data import FilesSource, MessagesFormat, PromptCompletionFormat
from ftkit.data.conversations import to_messages
from ftkit.data.rows import errors_at
from ftkit.data.sources import read_splits
from ftkit.data.tasks.sql_score import read_question
from ftkit.errors import DataError
from fuzzing.area import Area, Case
from fuzzing.mutate import damaged_bytes, damaged_json

if TYPE_CHECKING:
    import random
    from pathlib import Path

_ROWS = (
    {"question": "How many?", "answer": "SELECT 1", "sql_prompt": "How many?", "sql_context": "", "sql": "SELECT 1"},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}], "answer": "x"},
    {"messages": [{"from": "human", "value": "\U0001f600"}, {"from": "gpt", "value": "a\u2028b"}], "question": None},
)
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
    PromptCompletionFormat(kind="prompt-completion", prompt="{question}", completion="{answer}"),
    MessagesFormat(kind="messages"),
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
        rows = read_splits(FilesSource(kind="files", train=str(path), num_heldout=1)).train
    except DataError as error:
        _check_message(error, path)
        return False
    num_taken = 0
    for row in rows:
        for use in (*(lambda form=form, row=row: to_messages(row.columns, form) for form in _FORMATS),
                    lambda row=row: read_question(row.columns)):  # fmt: skip
            try:
                with errors_at(row):
                    use()
                num_taken += 1
            except DataError as error:
                _check_message(error, path)
    return num_taken > 0


def _check_message(error: DataError, path: Path) -> None:
    assert str(path) in error.what or "num_train + num_heldout" in error.what
    assert len(str(error)) < 2000


DATA = Area("data", _make, _run)
