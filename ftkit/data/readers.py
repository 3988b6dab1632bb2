"""Read the rows of one file: JSON Lines, JSON, CSV, Parquet, Arrow, text. Refuse files of other kinds."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from ftkit.data.rows import NUL_BYTES, Columns, RawRow, Row
from ftkit.errors import DataError, NotFoundError, one_line

if TYPE_CHECKING:
    from pyarrow import RecordBatch

COMPRESSIONS: Final = (".gz", ".bz2", ".xz", ".zst")
_BATCH_ROWS = 256
_BATCH_BYTES = 8 << 20  # pictures are large
_MAX_FIRST_LINE = 64 << 20
_MAX_CELL = 1 << 30
MAX_LINE = 128 << 20
"""Maximum bytes of a line: several times the size of the longest tokenizable text as JSON."""
_MAX_SKIPPED = 16
"""Maximum further chunks of `MAX_LINE` bytes to skip in one line; a file with a longer line has no rows."""
_BLANKS = re.compile(r"\s*")
_REST_OF_NUMBER = re.compile(r"[-+.\deE]*")  # what may follow in a number that the buffer's end cuts
_WRAPPERS = ("data", "rows", "examples", "instances")
"""Keys of a JSON object that may hold the list of rows."""


def suffix_of(name: str) -> str:
    """Return a file's lowercase suffix, ignoring that of a compression."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def cut_error(path: str, error: Exception) -> DataError:
    """Return the error for a truncated or damaged file."""
    return DataError(
        f"{path} can't be read to its end: {one_line(error) or type(error).__name__}",
        meaning="the file is truncated or damaged, or has another format than its name says",
        fix="copy or download it again, and compare sizes",
    )


def read_json_lines(path: Path) -> list[Row]:
    """Read a JSON Lines file, which is UTF-8 with or without a byte-order mark. Blank lines are skipped."""
    try:
        with path.open("rb") as file:
            check_kind(file.peek(START_BYTES), str(path))
            return [row for raw in read_lines(file, str(path)) if (row := raw.parse())]
    except OSError as error:
        what = f"can't read {path}: {error.strerror}"
        if isinstance(error, FileNotFoundError):
            raise NotFoundError(what, fix="check the path") from error
        raise DataError(what, fix="ask its owner for read permission") from error


def read_lines(file: IO[bytes], path: str) -> Iterator[RawRow]:
    """Split lines at line feeds only: U+2028, U+2029 and U+0085 may occur inside a JSON text."""
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE), b""), start=1):
        if len(line) == MAX_LINE and not line.endswith(b"\n"):
            fix = f"write one object a line: jq -c '.[]' {shlex.quote(path)} > lines.jsonl"
            error = _long_line(path, number, "the file is one JSON value, or damaged", fix)
            yield RawRow(path, ":", number, error)
            for _ in range(_MAX_SKIPPED):  # reached only if the caller skips bad rows
                more = file.readline(MAX_LINE)
                if not more or more.endswith(b"\n"):
                    break
            else:
                raise error
        elif not line.isspace():
            yield RawRow(path, ":", number, line)


def _long_line(path: str, number: int, cause: str, fix: str) -> DataError:
    return DataError(
        f"{path}:{number}: a line of more than {MAX_LINE >> 20} MiB",
        meaning=f"{cause}: no row of this size can be trained on",
        fix=fix,
    )


def _read_json(file: IO[bytes], path: str) -> Iterator[RawRow]:
    """Read a list of objects, an object with such a list, or one object; otherwise read the file as JSON Lines."""
    line = file.readline(_MAX_FIRST_LINE)
    while line.isspace():
        line = file.readline(_MAX_FIRST_LINE)
    file.seek(0)
    if not line.removeprefix(codecs.BOM_UTF8).lstrip().startswith((b"[", b"{")) or _is_row(line):
        yield from read_lines(file, path)
        return
    with _as_text(file) as text:
        parser = _JsonParser(text, path)
        elements = parser.elements() if parser.peek() == "[" else parser.members()
        for number, element in enumerate(elements, start=1):
            yield RawRow(path, ", element ", number, element.encode())
        if parser.peek():
            raise cut_error(path, ValueError("there is text after the end of the JSON value"))


def _read_text(file: IO[bytes], path: str) -> Iterator[RawRow]:
    """Read a whole file as one row with the column `text`, unless it is JSON Lines."""
    line = file.readline(_MAX_FIRST_LINE)
    file.seek(0)
    if _is_row(line.removeprefix(codecs.BOM_UTF8)):
        yield from read_lines(file, path)
        return
    content = file.read(MAX_LINE)
    if file.read(1):
        yield RawRow(path, ":", 1, _long_line(path, 1, "the whole file is one row", "split it into several files"))
    elif content.strip():
        try:
            yield RawRow(path, ":", 1, {"text": content.decode("utf-8-sig")})
        except UnicodeDecodeError as error:
            yield RawRow(path, ":", 1, _not_utf8(path, error))


def _is_row(line: bytes) -> bool:
    """Return whether a line is a JSON object that does not wrap a list of rows."""
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(parsed, dict) and not any(_is_list_of_objects(parsed.get(name)) for name in _WRAPPERS)


def _is_list_of_objects(value: object) -> bool:
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
        self._file, self._path = file, path
        self._text, self._at = "", 0  # the buffer, and the position in it
        self._decoder = json.JSONDecoder()

    def peek(self) -> str:
        """Return the next non-blank character; empty at the end."""
        while True:
            self._at = _BLANKS.match(self._text, self._at).end()  # type: ignore[union-attr]  # it always matches
            if self._at < len(self._text) or not self._fill():
                return self._text[self._at : self._at + 1]

    def elements(self) -> Iterator[str]:
        self._take("[")
        while self.peek() != "]":
            yield self._value()
            if self.peek() == "]":
                break
            self._take(",")
            if self.peek() == "]":
                raise cut_error(self._path, ValueError("there is no element after the last comma"))
        self._take("]")

    def members(self) -> Iterator[str]:
        """Yield the elements of the list that an object wraps; without one, the object itself."""
        self._take("{")
        others: Columns = {}
        wrapper = None
        while self.peek() != "}":
            name = json.loads(self._value())
            self._take(":")
            if name in others or name == wrapper:
                raise DataError(f"{self._path}: duplicate key {name[:80]!r}", fix="correct the file")
            if name in _WRAPPERS and wrapper is None and self.peek() == "[":
                wrapper = name
                yield from self.elements()
            else:
                others[name] = json.loads(self._value())
            if self.peek() != "}":
                self._take(",")
        self._take("}")
        more = [name for name, value in others.items() if _is_list_of_objects(value)]
        if wrapper is None:
            yield json.dumps(others)
        elif more:
            raise DataError(
                f"{self._path}: there are rows under {wrapper!r}, and others under {', '.join(map(repr, more))}",
                fix=f"choose: jq -c '.{wrapper}[]' {shlex.quote(self._path)} > {wrapper}.jsonl",
            )

    def _take(self, wanted: str) -> None:
        if self.peek() != wanted:
            following = self._text[self._at : self._at + 20]
            raise cut_error(self._path, ValueError(f"{wanted!r} is missing before {following!r}"))
        self._at += 1

    def _value(self) -> str:
        self.peek()
        while True:
            try:
                _, end = self._decoder.raw_decode(self._text, self._at)
            except RecursionError as error:
                raise DataError(f"{self._path}: nested too deep", fix="flatten the data") from error
            except ValueError as error:  # incomplete, invalid, or an integer of thousands of digits
                is_complete = not isinstance(error, json.JSONDecodeError) or len(self._text) - self._at > _MAX_CELL
                if is_complete or not self._fill():
                    raise cut_error(self._path, error) from error
                continue
            length = end - self._at
            if not _REST_OF_NUMBER.fullmatch(self._text, end) or not self._fill():
                start, self._at = self._at, self._at + length
                return self._text[start : self._at]

    def _fill(self) -> bool:
        """Read as much again as the rest of the buffer, so that a long value is parsed again only a few times."""
        rest = self._text[self._at :]
        try:
            more = self._file.read(max(1 << 20, len(rest)))
        except UnicodeDecodeError as error:
            raise _not_utf8(self._path, error) from error
        self._text, self._at = rest + more, 0
        return bool(more)


def _not_utf8(where: str, error: UnicodeDecodeError) -> DataError:
    return DataError(f"{where}: not UTF-8: {one_line(error)}", fix="convert it to UTF-8 with iconv")


def _read_csv(file: IO[bytes], path: str) -> Iterator[RawRow]:
    """Read rows, each with the number of its first line: quoted texts may have line breaks."""
    csv.field_size_limit(MAX_LINE)
    last = 1
    with _as_text(file) as text:
        separator = "\t" if suffix_of(path) == ".tsv" else ","
        reader = csv.reader(_limited_lines(text, path), delimiter=separator, strict=True)
        try:
            names = next(reader, [])
            _check_names(names, path)
            last = reader.line_num
            for values in reader:
                first, last = last + 1, reader.line_num
                if values:
                    yield RawRow(path, ":", first, _csv_columns(names, values, f"{path}:{first}"))
        except csv.Error as error:
            fix = 'close the quotes of its fields, and double those inside: "said ""hi"""'
            raise DataError(f"{path}: after line {last}: not valid CSV: {error}", fix=fix) from error
        except UnicodeDecodeError as error:
            raise _not_utf8(f"{path}: after line {last}", error) from error


def _limited_lines(file: IO[str], path: str) -> Iterator[str]:
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE), ""), start=1):
        if len(line) == MAX_LINE and not line.endswith(("\r", "\n")):
            raise _long_line(path, number, "the file is damaged, or not CSV", "rewrite it with one row a line")
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


def _csv_columns(names: Sequence[str], values: Sequence[str], where: str) -> Columns | DataError:
    if len(values) != len(names):
        return DataError(
            f"{where}: {'more' if len(values) > len(names) else 'fewer'} columns than the first line lists",
            meaning="a comma or a line break in a text needs quotes around it",
            fix="correct this line, or convert the file to JSON Lines",
        )
    if any("\0" in value for value in values):
        return DataError(f"{where}: NUL bytes", meaning=NUL_BYTES, fix="rewrite the file in UTF-8")
    return dict(zip(names, values, strict=True))


def _read_table(file: IO[bytes], path: str) -> Iterator[RawRow]:
    """Read Parquet, or Arrow as a file or a stream."""
    import pyarrow.parquet  # noqa: PLC0415 - slow to import

    try:
        batches: Iterable[RecordBatch]
        if suffix_of(path) == ".parquet":
            table = pyarrow.parquet.ParquetFile(file, buffer_size=_BATCH_BYTES, pre_buffer=False)  # else all is kept
            size = sum(table.metadata.row_group(each).total_byte_size for each in range(table.num_row_groups))
            num_rows = min(_BATCH_ROWS, 1 + _BATCH_BYTES * table.metadata.num_rows // (1 + size))
            schema, batches = table.schema_arrow, table.iter_batches(num_rows)
        elif file.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(file)
            schema, batches = reader.schema, map(reader.get_batch, range(reader.num_record_batches))
        else:
            file.seek(0)
            stream = pyarrow.ipc.open_stream(file)
            schema, batches = stream.schema, stream
        _check_names(schema.names, path)
        parts = (batch.slice(at, _BATCH_ROWS) for batch in batches for at in range(0, batch.num_rows, _BATCH_ROWS))
        number = 0
        for part in parts:
            for content in _rows_of(part):
                number += 1
                if isinstance(content, dict):
                    yield RawRow(path, ", row ", number, without_nulls(content))
                    continue
                error = DataError(
                    f"{path}, row {number}: a value can't be read: {one_line(content)}",
                    meaning="a text that is not UTF-8, or a time that Python can't represent",
                    fix="correct it, or leave the column out, in the program that writes the file",
                )
                yield RawRow(path, ", row ", number, error)
    except pyarrow.ArrowException as error:
        raise cut_error(path, error) from error


def _rows_of(batch: RecordBatch) -> list[Columns | Exception]:
    try:
        rows: list[Columns | Exception] = batch.to_pylist()
    except (ValueError, OverflowError) as error:  # one by one, to find the bad row
        one_by_one = (batch.slice(place, 1) for place in range(batch.num_rows))
        return [error] if batch.num_rows == 1 else [row for one in one_by_one for row in _rows_of(one)]
    return rows


def without_nulls(columns: Columns) -> Columns:
    """Remove keys with a null from objects inside columns: a table gives every object of a column the union of keys.

    Otherwise a tool call's arguments would include those of other rows' calls, each with a null.
    """
    return {name: _without_nulls(value) for name, value in columns.items()}


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


READERS: Mapping[str, tuple[str, Callable[[IO[bytes], str], Iterator[RawRow]]]] = {
    ".jsonl": ("JSON Lines", read_lines),
    ".ndjson": ("JSON Lines", read_lines),
    ".json": ("JSON", _read_json),
    ".parquet": ("Parquet", _read_table),
    ".csv": ("CSV", _read_csv),
    ".tsv": ("TSV", _read_csv),
    ".arrow": ("Arrow", _read_table),
    ".feather": ("Arrow", _read_table),
    ".txt": ("text", _read_text),
    ".md": ("text", _read_text),
}
"""Format name and reader by suffix; files with any other suffix are JSON Lines."""
IN_FOLDERS: Final = [suffix for suffix, (name, _) in READERS.items() if name != "text"]
"""Suffixes of files that are read from a folder, without text files: they often describe the data."""

_KINDS: Final = (
    ("compressed by gzip", rb"\x1f\x8b", ".gz"),
    ("compressed by bzip2", rb"BZh[1-9]1AY&SY", ".bz2"),
    ("compressed by xz", rb"\xfd7zXZ", ".xz"),
    ("compressed by zstd", rb"\x28\xb5\x2f\xfd", ".zst"),
    ("a Parquet file", rb"PAR1", ".parquet"),
    ("an Arrow file", rb"ARROW1", ".arrow"),
    ("a Feather version 1 file", rb"FEA1", ""),
    ("compressed by lz4", rb"\x04\x22\x4d\x18", ""),
    ("a ZIP archive", rb"PK(?:\x03\x04|\x05\x06)", ""),
    ("a tar archive", rb".{257}ustar", ""),
    ("an SQLite database", rb"SQLite format 3\0", ""),
    ("a Python pickle", rb"\x80[\x02-\x05][\x8c\x95c(\]}K]", ""),
    ("a PDF", rb"%PDF-", ""),
    ("a web page", rb"(?i)(?:\xef\xbb\xbf)?\s*<(?:!doctype\s+html|html|head)\b", ""),
)
"""Kinds of files with the pattern at their beginning, and the suffix of their reader, if there is one."""
START_BYTES: Final = 512  # bytes of a file's beginning from which its kind is recognized


def check_kind(start: bytes, file: str, expected: str = "JSON Lines", suffix: str = "") -> None:
    """Refuse a file whose content is of another kind than its name says.

    `start` is already decompressed if the name has the suffix of a compression. `suffix` is the expected suffix of
    binary files.
    """
    for kind, pattern, own in _KINDS:
        if re.match(pattern, start, re.DOTALL) and (not own or own != suffix.replace(".feather", ".arrow")):
            raise DataError(
                f"{file} is {kind}, not {expected}",
                meaning="the suffix of a file selects its reader, by which this one can't be read",
                fix=f"rename it: mv {shlex.quote(file)} …{own}"
                if own
                else "unpack or convert it: JSON Lines, Parquet and CSV are read; or download it again",
            )
