"""JSON Lines files: valid lines, and how invalid ones are reported."""

from __future__ import annotations

import codecs
import json
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.data.readers import read_json_lines
from ftkit.data.rows import MAX_DEPTH, Row, errors_at
from ftkit.data.source_files import read_file
from ftkit.errors import DataError, NotFoundError

if TYPE_CHECKING:
    from pathlib import Path

SEPARATORS = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\r\nh"


def columns(path: Path) -> list[dict[str, Any]]:
    return [row.columns for row in read_json_lines(path)]


def test_python_line_separators_may_occur_inside_a_text(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"text": SEPARATORS}, ensure_ascii=False) + "\n{}\n", encoding="utf-8", newline="\n")
    assert columns(path) == [{"text": SEPARATORS}, {}]


@pytest.mark.parametrize("content", [b'{"a": 1}\r\n{"a": 2}\r\n', codecs.BOM_UTF8 + b'{"a": 1}\n\n{"a": 2}'])
def test_crlf_a_byte_order_mark_and_blank_lines_are_accepted(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    assert columns(path) == [{"a": 1}, {"a": 2}]


def test_each_row_knows_its_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert [row.where for row in read_json_lines(path)] == [f"{path}:1", f"{path}:3"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": 1', r"bad\.jsonl:2: not valid JSON: .* at position 9"),
        (b"[1, 2]", r"bad\.jsonl:2: not a JSON object"),
        (b'{"a": "caf\xe9"}', r"bad\.jsonl:2: not UTF-8: byte 0xe9 at position 11.*\n.*ISO-8859-1\n.*iconv -f ISO"),
        (b'{"a": "\\ud83d"}', r"bad\.jsonl:2: \\ud83d is a lone surrogate"),
        (b'{"a": {"b": ["\\uDE00"]}}', r"bad\.jsonl:2: \\ude00 is a lone surrogate"),
        (b'{"a": 1, "a": 2}', r"bad\.jsonl:2: not valid JSON: duplicate key 'a'"),
        (b'{"a": ' + b"9" * 5000 + b"}", r"bad\.jsonl:2: not valid JSON: Exceeds the limit"),
        (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", r"bad\.jsonl:2: nested more than 64 deep"),
        (b'{"a": ' + b"[" * 99999 + b"]" * 99999 + b"}", r"bad\.jsonl:2: not valid JSON: maximum recursion depth"),
        (b'{"a": ' * 99999, r"bad\.jsonl:2: not valid JSON"),
    ],
)
def test_an_invalid_line_is_reported_with_file_and_line(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"ok": 1}\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        read_json_lines(path)


def test_a_missing_file_is_not_blamed_on_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"prompts\.jsonl: .*\n(?!.*recipe)"):
        read_json_lines(tmp_path / "prompts.jsonl")


def test_a_json_array_and_utf_16_are_recognized(tmp_path: Path) -> None:
    path = tmp_path / "array.json"
    path.write_text('[\n{"a": 1}\n]')
    with pytest.raises(DataError, match=r"array\.json:1: .*\n.*array.*\n.*jq -c"):
        read_json_lines(path)
    path.write_text('{"a": 1}\n', encoding="utf-16")
    with pytest.raises(DataError, match=r"not UTF-8.*\n.*UTF-16"):
        read_json_lines(path)


@pytest.mark.parametrize(("content", "program"), [('[{"a": 1}]', "'.[]'"), ('"a"\n"b"\n', "'{text: .}'")])
def test_rows_that_are_no_objects_come_with_the_command_that_makes_them_objects(
    content: str, program: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        next(read_file(str(path))).parse()
    assert f"jq -c {program} {path} > rows.jsonl" in caught.value.fix


def test_surrogate_pairs_and_many_shallow_values_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    turns = [{"role": "user", "content": "\U0001f600"}] * (2 * MAX_DEPTH)
    path.write_text(json.dumps({"turns": turns}) + "\n")
    assert columns(path) == [{"turns": turns}]


def test_a_folder_or_a_missing_file_cannot_be_read(tmp_path: Path) -> None:
    for path, kind in ((tmp_path, DataError), (tmp_path / "none.jsonl", NotFoundError)):
        with pytest.raises(kind, match="can't read"):
            read_json_lines(path)


def test_an_error_reports_the_location_and_the_beginning_of_the_example() -> None:
    row = Row({"text": "\x1b[2J\x9b\u202e" + "x" * 500}, "train.jsonl:7")
    with pytest.raises(DataError) as caught, errors_at(row):
        raise DataError("too odd", meaning="it is odd", fix="make it even")
    assert caught.value.what == "train.jsonl:7: too odd"
    assert caught.value.meaning.startswith('it is odd; the example: {"text": "')
    assert len(caught.value.meaning) < 300
    assert caught.value.meaning.isprintable()
    assert caught.value.fix == "make it even"
