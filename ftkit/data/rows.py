"""Rows of data with their file and line, and JSON Lines files."""

from __future__ import annotations

import codecs
import json
import re
import shlex
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftkit.data.file_kinds import START_BYTES, check_kind
from ftkit.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

Columns = dict[str, Any]

MAX_DEPTH = 64
"""Maximum nesting: far more than a conversation has, far less than Python's stack."""
_EXCERPT = 200
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_NUL = "\0"
NUL_BYTES = "the file is UTF-16, or was damaged when it was copied or a disk was full"
_TEXT_SUFFIXES = (".txt", ".md")
_ENCODINGS = (
    (codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"), (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)  # fmt: skip
"""Byte-order marks; that of UTF-32 begins with that of UTF-16."""


@dataclass(frozen=True, slots=True)
class Row:
    """The columns of one example, and its place: `FILE:LINE`, or its number in a dataset."""

    columns: Columns
    where: str


@contextmanager
def errors_at(row: Row) -> Iterator[None]:
    """Add the row's place and its beginning to a DataError raised inside."""
    try:
        yield
    except DataError as error:
        shown = json.dumps(row.columns, ensure_ascii=False, default=str)[:_EXCERPT]
        excerpt = "the example: " + "".join(character if character.isprintable() else "?" for character in shown)
        meaning = f"{error.meaning}; {excerpt}" if error.meaning else excerpt
        raise type(error)(f"{row.where}: {error.what}", meaning=meaning, fix=error.fix) from error


def read_json_lines(path: Path) -> list[Row]:
    """Read a JSON Lines file, which is UTF-8 with or without a byte-order mark. Blank lines are skipped.

    Raises:
        DataError: the file can't be read, or a line is not a valid JSON object.
    """
    try:
        with path.open("rb") as file:
            check_kind(file.peek(START_BYTES), str(path), "JSON Lines")
            return list(_parse(file, path))
    except OSError as error:
        fix = "check the path" if isinstance(error, FileNotFoundError) else "ask its owner for read permission"
        raise DataError(f"can't read {path}: {error.strerror}", fix=fix) from error


def write_json_lines(path: Path, rows: Iterable[Row]) -> None:
    """Write rows so that `read_json_lines` reads them; dates and other values without a JSON form become text."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row.columns, ensure_ascii=False, default=str) + "\n" for row in rows)


def _parse(lines: Iterable[bytes], path: Path) -> Iterator[Row]:
    """Parse lines that end at line feeds only: U+2028, U+2029 and U+0085 may occur inside a JSON text."""
    for number, line in enumerate(lines, start=1):
        if not line.isspace():
            row = parse_row(line, str(path), f"{path}:{number}", is_first=number == 1)
            if row is not None:
                yield row


def parse_row(content: bytes, file: str, where: str, *, is_first: bool) -> Row | None:
    """Parse the JSON text of a row; None if it is blank.

    Args:
        content: the text.
        file: its file.
        where: file and line, for errors.
        is_first: whether it may begin with a byte-order mark.

    Raises:
        DataError: it is not UTF-8, or not a JSON object that can be trained on.
    """
    if is_first:
        content = content.removeprefix(codecs.BOM_UTF8)
    text = _decode(content, file, where)
    return Row(_parse_object(text, file, where, is_first=is_first), where) if text.strip() else None


def _decode(line: bytes, file: str, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        likely = next((name for mark, name in _ENCODINGS if line.startswith(mark)), "ISO-8859-1")
        raise DataError(
            f"{where}: not UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1} of the line",
            meaning=f"the file has another encoding, probably {likely}",
            fix=f"convert it: iconv -f {likely} -t UTF-8 {shlex.quote(file)} > converted.jsonl",
        ) from error


def _parse_object(text: str, file: str, where: str, *, is_first: bool) -> Columns:
    one_object = "each row is one JSON object; in JSON Lines, one per line"
    try:
        parsed = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        is_array = text.lstrip().startswith("[")
        reason = f"{error.msg} at position {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
        reason = f"a NUL byte at position {text.index(_NUL) + 1}" if _NUL in text else reason
        fix = f"{one_object}: jq -c '.[]' {shlex.quote(file)} > lines.jsonl" if is_array else one_object
        if is_text := file.lower().endswith(_TEXT_SUFFIXES):
            fix = f"make one row of it: jq -cRs '{{text: .}}' {shlex.quote(file)} > text.jsonl"
        raise DataError(
            f"{where}: not valid JSON: {reason}",
            meaning=_why_invalid(text, is_array=is_array, is_text=is_text),
            fix=fix,
        ) from error
    if not isinstance(parsed, dict):
        command = _make_object(parsed, file, is_element=", element " in where) if is_first else ""
        raise DataError(f"{where}: not a JSON object", fix=command or one_object)
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deeper(parsed, MAX_DEPTH):
        raise DataError(f"{where}: nested more than {MAX_DEPTH} deep", fix="flatten or remove this example")
    if _SURROGATE.search(text):
        _check_surrogates(parsed, where)
    return parsed


def _why_invalid(text: str, *, is_array: bool, is_text: bool) -> str:
    if _NUL in text:
        return NUL_BYTES
    if is_text:
        return "a file with this suffix is read as JSON Lines, and this one is plain text"
    if "\r" in text.rstrip():
        return "its lines end in carriage returns, or contain them"
    return "the file is one array, or its objects span several lines" if is_array or text.strip() == "{" else ""


def _make_object(parsed: object, file: str, *, is_element: bool) -> str:
    """Return the command that makes objects of rows like this one; empty if there is none."""
    program = "{text: .}" if isinstance(parsed, str) else ""
    if isinstance(parsed, list) and parsed and isinstance(parsed[0], dict):
        program = "{messages: .}" if {"role", "from"} & parsed[0].keys() else ".[]"
    whole = f".[] | {program}" if is_element else program
    return f"make objects of them: jq -c {shlex.quote(whole)} {shlex.quote(file)} > rows.jsonl" if program else ""


def _unique(pairs: list[tuple[str, Any]]) -> Columns:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {name[:80]!r}")
    return unique


def _is_deeper(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [child for children in inner for child in children]
    return bool(level)


def _check_surrogates(parsed: Columns, where: str) -> None:
    try:
        json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = str(error.object)[error.start]
        raise DataError(
            f"{where}: \\u{ord(half):04x} is a lone surrogate, half of a character",
            meaning="a text was cut inside an emoji or another character that JSON writes as two escapes",
            fix="correct or remove this example",
        ) from error
