"""Read the rows of one file: JSON Lines, JSON, CSV, Parquet, Arrow."""

from __future__ import annotations

import codecs
import csv
import io
import json
import shlex
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from ftkit.data.rows import NUL_BYTES, Columns, Row, parse_row
from ftkit.errors import DataError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

COMPRESSIONS: Final = (".gz", ".bz2", ".xz", ".zst")
_BATCH_ROWS = 256
_BUFFER = 1 << 20
_MAX_FIRST_LINE = 64 << 20
_MAX_CELL = 1 << 30
MAX_LINE = 128 << 20
"""Bytes of a line; several times what the longest text that is tokenized takes as JSON."""
_MAX_SKIPPED = 16
"""Further parts of `MAX_LINE` bytes of one line that are skipped: a file with a longer one has no rows."""
_WRAPPERS = ("data", "rows", "examples", "instances")
"""Keys of a JSON object that may hold the list of rows."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as it was read.

    Attributes:
        separator: text between the file's name and the number.
        number: line or row, counted from 1, or as the dataset counts.
        content: JSON text that is not parsed yet, the columns, or the row's error.
    """

    file: str
    separator: str
    number: int
    content: bytes | Columns | DataError

    def parse(self) -> Row | None:
        """Return the columns and their place; None for a blank line.

        Raises:
            DataError: the line is not a JSON object that can be trained on.
        """
        if isinstance(self.content, DataError):
            raise self.content
        where = f"{self.file}{self.separator}{self.number}"
        if isinstance(self.content, bytes):
            return parse_row(self.content, self.file, where, is_first=self.number == 1)
        return Row(self.content, where)


def suffix_of(name: str) -> str:
    """Return a file's lowercase suffix, without that of a compression."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def cut_error(path: str, error: Exception) -> DataError:
    """Return the error of a file that ends too early or is damaged."""
    return DataError(
        f"{path} can't be read to its end: {one_line(error) or type(error).__name__}",
        meaning="the file is truncated or damaged, or has another format than its name says",
        fix="copy or download it again, and compare sizes",
    )


def read_lines(file: IO[bytes], path: str) -> Iterator[RawRow]:
    """Read lines that end at line feeds only: U+2028, U+2029 and U+0085 may occur inside a JSON text."""
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE), b""), start=1):
        if len(line) == MAX_LINE and not line.endswith(b"\n"):
            yield RawRow(path, ":", number, _long_line(path, number))
            for _ in range(_MAX_SKIPPED):  # read only by callers that skip bad rows
                more = file.readline(MAX_LINE)
                if not more or more.endswith(b"\n"):
                    break
            else:
                raise _long_line(path, number)
        elif not line.isspace():
            yield RawRow(path, ":", number, line)


def _long_line(path: str, number: int) -> DataError:
    return DataError(
        f"{path}:{number}: a line of more than {MAX_LINE >> 20} MiB",
        meaning="the file is one JSON value, or damaged: no row of this size can be trained on",
        fix=f"write one object a line: jq -c '.[]' {shlex.quote(path)} > lines.jsonl",
    )


def _read_json(file: IO[bytes], path: str) -> Iterator[RawRow]:
    """Read a list of objects, an object with such a list, or one object; else JSON Lines under another name."""
    line = file.readline(_MAX_FIRST_LINE)
    while line.isspace():
        line = file.readline(_MAX_FIRST_LINE)
    file.seek(0)
    is_lines = not line.removeprefix(codecs.BOM_UTF8).lstrip().startswith((b"[", b"{")) or _is_row(line)
    if is_lines:
        yield from read_lines(file, path)
        return
    with _as_text(file) as text:
        parser = _JsonParser(text, path)
        elements = parser.elements() if parser.peek() == "[" else parser.members()
        for number, element in enumerate(elements, start=1):
            yield RawRow(path, ", element ", number, element.encode())
        if parser.peek():
            raise DataError(
                f"{path}: there is text after the end of the JSON value",
                meaning="the file is damaged, or has several JSON texts one after another",
                fix=f"write one object a line: jq -c . {shlex.quote(path)} > lines.jsonl",
            )


def _is_row(line: bytes) -> bool:
    """Tell whether a line is a JSON object that holds no list of rows."""
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(parsed, dict) and not any(_is_list_of_rows(parsed.get(name)) for name in _WRAPPERS)


def _is_list_of_rows(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


@contextmanager
def _as_text(file: IO[bytes]) -> Iterator[IO[str]]:
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")
    try:
        yield text
    finally:
        text.detach()  # the caller closes the file


class _JsonParser:
    """Parses a JSON text incrementally, with one value and a buffer in memory."""

    def __init__(self, file: IO[str], path: str) -> None:
        self._file, self._path, self._text = file, path, ""
        self._decoder = json.JSONDecoder()

    def peek(self) -> str:
        """Return the next character that is not blank; empty at the end."""
        self._text = self._text.lstrip()
        while not self._text and self._fill():
            self._text = self._text.lstrip()
        return self._text[:1]

    def elements(self) -> Iterator[str]:
        """Yield the texts of a list's elements."""
        self._take("[")
        while self.peek() != "]":
            yield self._value()
            if self.peek() != "]":
                self._take(",")
        self._take("]")

    def members(self) -> Iterator[str]:
        """Yield the elements of the list that an object wraps, or the object itself if it wraps none.

        Raises:
            DataError: a duplicate key, or a second list of rows.
        """
        self._take("{")
        others: dict[str, Any] = {}
        wrapper = None
        while self.peek() != "}":
            name = json.loads(self._value())
            self._take(":")
            if name in _WRAPPERS and wrapper is None and self.peek() == "[":
                wrapper = name
                yield from self.elements()
            elif name in others:
                raise DataError(f"{self._path}: duplicate key {name[:80]!r}", fix="correct the file")
            else:
                others[name] = json.loads(self._value())
            if self.peek() != "}":
                self._take(",")
        self._take("}")
        more = [name for name, value in others.items() if _is_list_of_rows(value)]
        if wrapper is None:
            yield json.dumps(others)
        elif more:
            raise DataError(
                f"{self._path}: there are rows under {wrapper!r}, and others under {', '.join(map(repr, more))}",
                fix=f"choose: jq -c '.{wrapper}[]' {shlex.quote(self._path)} > {wrapper}.jsonl",
            )

    def _take(self, wanted: str) -> None:
        if self.peek() != wanted:
            raise cut_error(self._path, ValueError(f"{wanted!r} is missing before {self._text[:20]!r}"))
        self._text = self._text[1:]

    def _value(self) -> str:
        """Return the text of the next value."""
        self.peek()
        while True:
            try:
                _, end = self._decoder.raw_decode(self._text)
            except RecursionError as error:
                raise DataError(f"{self._path}: nested too deep", fix="flatten the data") from error
            except json.JSONDecodeError as error:
                if len(self._text) > _MAX_CELL or not self._fill():
                    raise cut_error(self._path, error) from error
                continue
            except ValueError as error:  # an integer of thousands of digits
                raise cut_error(self._path, error) from error
            if end < len(self._text) or not self._fill():  # a number may continue
                text, self._text = self._text[:end], self._text[end:]
                return text

    def _fill(self) -> bool:
        """Double the buffer, so that a long value is parsed again only a few times."""
        try:
            more = self._file.read(max(_BUFFER, len(self._text)))
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self._path}: not UTF-8: {one_line(error)}", fix="convert it to UTF-8 with iconv"
            ) from error
        self._text += more
        return bool(more)


def _read_csv(file: IO[bytes], path: str) -> Iterator[RawRow]:
    """Read rows with the line that each begins at: quoted texts may have line breaks."""
    csv.field_size_limit(_MAX_CELL)
    last = 1
    with _as_text(file) as text:
        reader = csv.reader(
            _limited_lines(text, path), delimiter="\t" if suffix_of(path) == ".tsv" else ",", strict=True
        )
        try:
            names = next(reader, [])
            _check_names(names, path)
            last = reader.line_num
            for values in reader:
                first, last = last + 1, reader.line_num
                if values:
                    problem = _csv_problem(names, values, f"{path}:{first}")
                    yield RawRow(path, ":", first, problem or dict(zip(names, values, strict=True)))
        except csv.Error as error:
            raise DataError(f"{path}: after line {last}: not valid CSV: {error}", fix="correct this line") from error
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: after line {last}: not UTF-8: {one_line(error)}", fix="convert it to UTF-8 with iconv"
            ) from error


def _limited_lines(file: IO[str], path: str) -> Iterator[str]:
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE), ""), start=1):
        if len(line) == MAX_LINE and not line.endswith(("\r", "\n")):
            raise DataError(
                f"{path}:{number}: a line of more than {MAX_LINE >> 20} MiB",
                meaning="the file is damaged, or not CSV: no row of this size can be trained on",
                fix="rewrite it with one row a line",
            )
        yield line


def _check_names(names: Sequence[str], path: str) -> None:
    """Refuse duplicate column names, and files with another separator."""
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise DataError(
            f"{path}: there are two columns {', '.join(map(repr, duplicates))}",
            meaning="the values of one of them would be lost",
            fix="rename or remove one of them",
        )
    other = next((mark for mark in ";|\t" if len(names) == 1 and mark in names[0]), None)
    if other:
        raise DataError(
            f"{path}: the columns are separated by {other!r}",
            meaning="columns are separated by commas in .csv files and by tabs in .tsv files",
            fix="rewrite it with commas, or rename it to .tsv if these are tabs",
        )


def _csv_problem(names: Sequence[str], values: Sequence[str], where: str) -> DataError | None:
    if len(values) != len(names):
        return DataError(
            f"{where}: {'more' if len(values) > len(names) else 'fewer'} columns than the first line lists",
            meaning="a comma or a line break in a text needs quotes around it",
            fix="correct this line, or convert the file to JSON Lines",
        )
    if any("\0" in value for value in values):
        return DataError(f"{where}: NUL bytes", meaning=NUL_BYTES, fix="rewrite the file in UTF-8")
    return None


def _read_parquet(file: IO[bytes], path: str) -> Iterator[RawRow]:
    from pyarrow import parquet  # noqa: PLC0415 - heavy

    with arrow_errors(path):
        table = parquet.ParquetFile(file)
        _check_names(table.schema_arrow.names, path)
        yield from _table_rows(table.iter_batches(_BATCH_ROWS), path)


def _read_arrow(file: IO[bytes], path: str) -> Iterator[RawRow]:
    import pyarrow as pa  # noqa: PLC0415 - heavy

    with arrow_errors(path):
        start = file.read(6)
        file.seek(0)
        if start.startswith(b"FEA1"):
            raise DataError(f"{path} is a Feather version 1 file", fix="rewrite it as version 2, or as Parquet")
        is_file = start == b"ARROW1"
        reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        _check_names(reader.schema.names, path)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
        yield from _table_rows((part for batch in batches for part in _slices(batch)), path)


def _slices(batch: Any) -> Iterator[Any]:
    return (batch.slice(begin, _BATCH_ROWS) for begin in range(0, batch.num_rows, _BATCH_ROWS))


def _table_rows(batches: Iterator[Any], path: str) -> Iterator[RawRow]:
    number = 0
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except (ValueError, OverflowError):  # one by one, to find the bad row
            rows = [_only_row(batch.slice(place, 1)) for place in range(batch.num_rows)]
        for content in rows:
            number += 1
            bad = isinstance(content, Exception)
            yield RawRow(path, ", row ", number, _bad_cell(content, path, number) if bad else without_nulls(content))


def without_nulls(columns: Columns) -> Columns:
    """Remove keys with a null from objects inside columns: a table gives all objects of a column the keys of each.

    Otherwise a tool call's arguments would have those of other rows' calls, each with a null.
    """
    return {name: _without_nulls(value) for name, value in columns.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _bad_cell(error: Exception, path: str, number: int) -> DataError:
    if isinstance(error, UnicodeDecodeError):
        return DataError(
            f"{path}, row {number}: not UTF-8: {one_line(error)}",
            meaning="a text column has bytes of another encoding",
            fix="convert them to UTF-8 in the program that writes the file",
        )
    return DataError(
        f"{path}, row {number}: a value has no form in Python: {one_line(error)}",
        meaning="it is a time beyond the year 9999 or before the year 1, or finer than a microsecond",
        fix="write the column as text, or leave it out, in the program that writes the file",
    )


def _only_row(batch: Any) -> Any:
    try:
        return batch.to_pylist()[0]
    except (ValueError, OverflowError) as error:
        return error


@contextmanager
def arrow_errors(path: str) -> Iterator[None]:
    """Convert an error of pyarrow to a DataError about a truncated or damaged file."""
    import pyarrow as pa  # noqa: PLC0415 - slow to import

    try:
        yield
    except pa.ArrowException as error:
        raise cut_error(path, error) from error


READERS: Mapping[str, Callable[[IO[bytes], str], Iterator[RawRow]]] = {
    ".jsonl": read_lines,
    ".ndjson": read_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}
"""Readers by suffix; files with any other suffix are JSON Lines."""
JSON_LINES: Final = "JSON Lines"
FORMATS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    ".json": ("JSON", ()),
    ".csv": ("CSV", ()),
    ".tsv": ("TSV", ()),
    ".parquet": ("Parquet", (".parquet",)),
    ".arrow": ("Arrow", (".arrow",)),
    ".feather": ("Arrow", (".arrow",)),
}
"""Name of the format that a suffix stands for, and the kinds of binary files that have it; others are JSON Lines."""
