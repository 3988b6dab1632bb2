"""The texts of errors of `data` and `hub`: tests/golden/errors/{data,hub}.txt.

`FTKIT_UPDATE_GOLDEN=1` rewrites the files: read the diff.
"""

from __future__ import annotations

import gzip
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from error_texts import check_error_texts

from ftkit.config.data import DataSpec
from ftkit.data.row_formats import check_format, read_example, resolve_format
from ftkit.data.rows import Row, errors_at
from ftkit.data.selection import read_rows
from ftkit.data.source_files import find_files, read_file
from ftkit.data.tokenizer_files import check_tokenizer_folder
from ftkit.hub.client import read_token
from ftkit.hub.push import check_hub_access
from ftkit.hub.readiness import check_data, check_weights
from ftkit.models.architecture import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ASK, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}

FILES = {
    "array.jsonl": b'[{"text": "a"},\n',
    "strings.jsonl": b'"a"\n"b"\n',
    "latin.jsonl": b'{"text": "caf\xe9"}\n',
    "other.csv": b"id;text\n1;a\n",
    "short.csv": b"id,text\n1\n",
    "packed.jsonl": gzip.compress(b"{}", mtime=0),
    "page.parquet": b"<!DOCTYPE html>",
    "cut.json": b'[{"text": "a"},',
    "pointer.jsonl": b"version https://git-lfs.github.com/spec/v1\n",
}
ROWS: dict[str, dict[str, object]] = {
    "unknown columns": {"question": "q", "reply": "a"},
    "preferences": {"prompt": "q", "chosen": [ANSWER], "rejected": [ANSWER]},
    "unknown key of a turn": {"messages": [ASK, ANSWER | {"mood": "good"}]},
    "unknown role": {"messages": [ASK, {"role": "bard2", "content": "a"}]},
    "blank turn": {"messages": [ASK, {"role": "assistant", "content": " "}]},
    "picture": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]},
    "another shape": {"text": "a", "mood": "good"},
}


def read_row(columns: dict[str, object]) -> None:
    data, row = DataSpec.model_validate({"source": "./x.jsonl"}), Row(dict(columns), "x.jsonl:7")
    form = resolve_format(data.format, [row])
    check_format(data, form, "next_token")
    with errors_at(row):
        read_example(row.columns, data, form)


def failures_of_data(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
        yield name, lambda path=str(folder / name): [raw.parse() for raw in read_file(path)]
    for name, columns in ROWS.items():
        yield name, partial(read_row, columns)
    for name in ("train.jsonl", "test.jsonl", "more/a.csv", "more/a.csv.gz"):
        (folder / "split" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "split" / name).write_text('{"text": "a"}\n')
    yield "splits", partial(find_files, str(folder / "split"), "data.source")
    yield "copies", partial(find_files, str(folder / "split" / "more"), "data.source")
    yield "nothing", partial(find_files, str(folder / "*.arrow"), "data.source")
    few = {"kind": "files", "train": str(folder / "split" / "train.jsonl"), "num_train": 5}
    yield "few rows", lambda: list(read_rows(DataSpec.model_validate({"source": few})))
    yield "no tokenizer", partial(check_tokenizer_folder, folder, "model")
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    yield "no template", partial(check_tokenizer_folder, folder, "model")
    yield "template of another model", partial(check_tokenizer_folder, folder, "chatml")


def failures_of_hub(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    offline = {"HF_HUB_OFFLINE": "1", "HOME": str(folder)}
    (folder / "hub").mkdir()
    (folder / "datasets").mkdir()
    yield "offline", partial(check_weights, ModelSpec(weights="org/model"), offline, folder)
    source = DataSpec.model_validate({"source": "org/data"}).sources[0]
    yield "offline data", partial(check_data, source, offline, folder)
    yield "token", partial(read_token, {"HF_TOKEN": "two words", "HOME": str(folder)})
    yield "push", partial(check_hub_access, "hf://name")


@pytest.mark.parametrize("failures", [failures_of_data, failures_of_hub])
def test_golden_error_texts(
    failures: Callable[[Path], Iterator[tuple[str, Callable[[], object]]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    check_error_texts(failures.__name__.removeprefix("failures_of_"), failures(tmp_path), {str(tmp_path): "/project"})
