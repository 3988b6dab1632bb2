"""Rows of data: `RawRow` as read from a file, `Row` parsed, with its place."""

from __future__ import annotations

import codecs
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ftkit.errors import DataError

Columns = dict[str, Any]  # a row's values by column, as JSON has them

MAX_DEPTH = 64  # maximum nesting: far more than a conversation has, far less than Python's stack
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
NUL_BYTES = "the file is UTF-16, or was damaged when it was copied or a disk was full"
_ENCODINGS = (
    (codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"), (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)  # fmt: skip
"""Byte-order marks, UTF-32's first: it begins with that of UTF-16."""


@dataclass(frozen=True, slots=True)
class Row:
    """The columns of one example, its place (`FILE:LINE`, or its number in a dataset), and the folder of its file."""

    columns: Columns
    where: str
    folder: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as read: unparsed JSON text, columns, or an error; its place is `FILE{separator}{number}`."""

    file: str
    separator: str
    number: int
    content: bytes | Columns | DataError

    @property
    def size(self) -> int:
        """Approximate bytes of the content."""
        return size_of(self.content)

    def parse(self) -> Row | None:
        """Return the columns and their place; None for a blank line."""
        if isinstance(self.content, DataError):
            raise self.content
        where = f"{self.file}{self.separator}{self.number}"
        folder = self.file.rpartition("/")[0]
        if isinstance(self.content, dict):
            return Row(self.content, where, folder)
        content = self.content.removeprefix(codecs.BOM_UTF8) if self.number == 1 else self.content
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            likely = next((name for mark, name in _ENCODINGS if content.startswith(mark)), "ISO-8859-1")
            raise DataError(
                f"{where}: not UTF-8: byte 0x{content[error.start]:02x} at position {error.start + 1} of the line",
                meaning=f"the file has another encoding, probably {likely}",
                fix=f"convert it: iconv -f {likely} -t UTF-8 {shlex.quote(self.file)} > converted.jsonl",
            ) from error
        return Row(self._parse_object(text, where), where, folder) if text.strip() else None

    def _parse_object(self, text: str, where: str) -> Columns:
        one_object = "each row is one JSON object; in JSON Lines, one per line"
        try:
            parsed = json.loads(text, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise self._invalid(text, where, error, one_object) from error
        if not isinstance(parsed, dict):
            file, program = shlex.quote(self.file), ".[]" if isinstance(parsed, list) else "{text: .}"
            raise DataError(f"{where}: not a JSON object", fix=f"{one_object}: jq -c '{program}' {file} > rows.jsonl")
        if text.count("[") + text.count("{") > MAX_DEPTH and _is_deeper(parsed, MAX_DEPTH):
            raise DataError(f"{where}: nested more than {MAX_DEPTH} deep", fix="flatten or remove this example")
        if _SURROGATE.search(text):
            try:
                json.dumps(parsed, ensure_ascii=False).encode("utf-8")
            except UnicodeEncodeError as error:
                raise DataError(
                    f"{where}: \\u{ord(str(error.object)[error.start]):04x} is a lone surrogate, half of a character",
                    meaning="a text was cut inside an emoji or another character that JSON writes as two escapes",
                    fix="correct or remove this example",
                ) from error
        return parsed

    def _invalid(self, text: str, where: str, error: Exception, fix: str) -> DataError:
        file, meaning = shlex.quote(self.file), ""
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')} at position {error.pos + 1}"
        if "\0" in text:
            reason, meaning = f"a NUL byte at position {text.index(chr(0)) + 1}", NUL_BYTES
        elif "\r" in text.rstrip():
            meaning = "its lines end in carriage returns, or contain them"
        elif text.lstrip().startswith("[") or text.strip() == "{":
            meaning = "the file is one array, or its objects span several lines"
            fix = f"{fix}: jq -c '.[]' {file} > lines.jsonl" if text.lstrip().startswith("[") else fix
        return DataError(f"{where}: not valid JSON: {reason}", meaning=meaning, fix=fix)


@contextmanager
def errors_at(row: Row) -> Iterator[None]:
    """Add the row's place and its beginning to a DataError raised inside."""
    try:
        yield
    except DataError as error:
        shown = json.dumps(row.columns, ensure_ascii=False, default=str)[:200]
        excerpt = "the example: " + "".join(character if character.isprintable() else "?" for character in shown)
        meaning = "; ".join(filter(None, [error.meaning, excerpt if row.columns else ""]))
        raise type(error)(f"{row.where}: {error.what}", meaning=meaning, fix=error.fix, name=error.name) from error


def check_skipped(errors: Sequence[DataError], allowed: int) -> None:
    """Raise the error of the first bad row beyond those allowed."""
    if len(errors) > allowed:
        first = errors[allowed]
        fix = f"{first.fix}; or skip bad rows: data.skip_bad=N ('ftkit data check' lists them)"
        raise DataError(first.what, meaning=first.meaning, fix=fix) from first


def size_of(value: object) -> int:
    """Return the approximate bytes of a value's texts, pictures and numbers."""
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, dict | list):
        return sum(map(size_of, value.values() if isinstance(value, dict) else value))
    return 8


def _unique(pairs: list[tuple[str, object]]) -> Columns:
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
