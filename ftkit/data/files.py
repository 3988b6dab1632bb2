"""Rows in files: found on this machine or at an address, decompressed, read one after another."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, cast

from ftkit.config.paths import is_address, is_file
from ftkit.data.rows import Columns, Row, parse_line
from ftkit.errors import DataError, NotFoundError, PrerequisiteError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

MAX_FILES: Final = 100_000
"""In a data set's folder; a walk through so many takes seconds."""
COMPRESSIONS: Final = (".gz", ".bz2", ".xz", ".zst")
_BATCH_ROWS = 256
_BUFFER = 1 << 20
_MAX_CELL = 1 << 30
_EXTRA = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as it was read: a line of JSON that is not parsed yet, or the columns of a table's row.

    Attributes:
        number: line or row, counted from 1, or as the data set counts.
        sequel: what stands between the file's name and the number.
    """

    file: str
    sequel: str
    number: int
    content: bytes | Columns

    def parse(self) -> Row | None:
        """Return the columns and their place; None for a blank line.

        Raises:
            DataError: the line is not a JSON object that can be trained on.
        """
        if isinstance(self.content, bytes):
            return parse_line(self.content, Path(self.file), self.number)
        return Row(self.content, f"{self.file}{self.sequel}{self.number}")


# --- Finding files -------------------------------------------------------------------------------


def find_files(place: str, key: str) -> list[str]:
    """Return the data files of a path, folder, pattern or address, sorted by name.

    Raises:
        NotFoundError: there are none.
        PrerequisiteError: a package or credentials for the address are missing.
    """
    if is_address(place):
        return _find_remote(place, key)
    path = Path(place)
    if has_magic(place) and not is_file(path):
        found = sorted(file for file in glob(place, recursive=True) if Path(file).is_file())  # noqa: PTH207 - absolute patterns
    elif _is_folder(path):
        found = sorted(str(file) for file in walk(path, key) if _is_data(file.name))
    else:
        found = [place]
    if not found:
        raise NotFoundError(
            f"{key}: {place} has no data files",
            meaning=f"looked for names that end in {', '.join(_READERS)}, or these with {', '.join(COMPRESSIONS)}",
            fix="give a file, a folder of such files, or a pattern that matches some",
        )
    return found


def walk(folder: Path, key: str) -> list[Path]:
    """Return all files of a data set's folder.

    Raises:
        NotFoundError: there are so many that it is probably another folder.
    """
    files: list[Path] = []
    num_seen = 0
    for where, folders, names in os.walk(folder):
        files += [Path(where, name) for name in names]
        num_seen += len(folders) + len(names)
        if num_seen > MAX_FILES:
            raise NotFoundError(
                f"{key}: there are more than {MAX_FILES:,} files and folders in {folder}",
                meaning="it is probably not the data set's own folder",
                fix=f"give the data set's own folder: {key}=PATH",
            )
    return files


def stamp(place: str, key: str) -> str:
    """Return a value that changes when the files at an address do. Raises as `find_files` does."""
    with _remote_errors(place, key):
        files, system = _find_remote(place, key), _file_system(place, key)
        about = [(file, system.info(file)) for file in files]
    keys = ("size", "ETag", "etag", "md5Hash", "mtime", "LastModified", "blob_id")
    return "\n".join(f"{file} {[str(info[key]) for key in keys if info.get(key)]}" for file, info in about)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # reading it will say why
        return False


def _is_data(name: str) -> bool:
    return not name.startswith((".", "_")) and _suffix(name) in _READERS


def _suffix(name: str) -> str:
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def _find_remote(place: str, key: str) -> list[str]:
    system, scheme = _file_system(place, key), place.partition("://")[0]
    with _remote_errors(place, key):
        if has_magic(place):
            found = system.glob(place)
        elif system.isdir(place):
            found = [file for file in system.find(place) if _is_data(Path(file).name)]
        else:
            found = [place] if system.exists(place) else []
    if not found:
        raise NotFoundError(f"{key}: there is nothing at {place}", fix="check the address, and your rights on it")
    return sorted(file if is_address(file) else f"{scheme}://{file}" for file in found)


def _file_system(place: str, key: str) -> Any:
    scheme = place.partition("://")[0]
    try:
        import fsspec  # noqa: PLC0415 - heavy, and an address alone needs it

        return fsspec.filesystem(scheme)
    except ImportError as error:
        raise PrerequisiteError(
            f"{key}: reading {scheme}:// needs the package {_EXTRA.get(scheme, 'fsspec')}",
            fix="pip install 'ftkit[storage]'",
        ) from error


@contextmanager
def _remote_errors(place: str, key: str) -> Iterator[None]:
    """Say what an error of a storage library means; which classes it raises is its own affair."""
    try:
        yield
    except (DataError, NotFoundError, PrerequisiteError):
        raise
    except FileNotFoundError as error:
        raise NotFoundError(f"{key}: there is nothing at {place}", fix="check the address") from error
    except Exception as error:
        advice = {
            "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run 'aws configure'",
            "gs": "run 'gcloud auth application-default login', or set GOOGLE_APPLICATION_CREDENTIALS",
            "hf": "run 'hf auth login', or set HF_TOKEN",
        }
        raise PrerequisiteError(
            f"{key}: can't read {place}: {one_line(error) or type(error).__name__}",
            meaning="there are no credentials, they don't reach this address, or there is no network",
            fix=advice.get(place.partition("://")[0], "check the address"),
        ) from error


# --- Reading files -------------------------------------------------------------------------------


def read_file(path: str, key: str = "data.source") -> Iterator[RawRow]:
    """Yield the rows of a file in order, without keeping them.

    Raises:
        DataError: the file can't be read, is cut, or is not what its name says.
    """
    read = _READERS.get(_suffix(path), _read_lines)
    try:
        with _open(path, key) as file:
            yield from read(file, path)
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise _cut(path, error) from error
    except OSError as error:
        if is_address(path):
            with _remote_errors(path, key):
                raise
        reason = error.strerror or one_line(error)
        raise (
            DataError(f"can't read {path}: {reason}", fix=f"check {key} in the recipe")
            if error.errno
            else _cut(path, error)
        ) from error


def count_rows(path: str, key: str = "data.source") -> int:
    """Return how many rows `read_file` yields, by the file's own count where it has one."""
    if _suffix(path) == ".parquet" and Path(path).suffix.lower() == ".parquet":
        from pyarrow import parquet  # noqa: PLC0415 - heavy

        with _open(path, key) as file, _arrow_errors(path):
            return int(parquet.ParquetFile(file).metadata.num_rows)
    return sum(1 for _ in read_file(path, key))


def _cut(path: str, error: Exception) -> DataError:
    return DataError(
        f"{path} can't be read to its end: {one_line(error) or type(error).__name__}",
        meaning="the file is cut or damaged, or is not what its name says: a copy or a download was interrupted",
        fix="copy or download it again, and compare sizes",
    )


@contextmanager
def _open(path: str, key: str) -> Iterator[IO[bytes]]:
    opened: Any
    if is_address(path):
        with _remote_errors(path, key):
            opened = _file_system(path, key).open(path, "rb")
    else:
        opened = Path(path).open("rb", buffering=_BUFFER)  # noqa: SIM115 - entered below
    with opened as file:
        match Path(path).suffix.lower():
            case ".gz":
                yield cast("IO[bytes]", gzip.GzipFile(fileobj=file))
            case ".bz2":
                yield cast("IO[bytes]", bz2.BZ2File(file))
            case ".xz":
                yield cast("IO[bytes]", lzma.LZMAFile(file))  # noqa: SIM115 - of an open file
            case ".zst":
                import pyarrow as pa  # noqa: PLC0415 - heavy

                yield io.BufferedReader(pa.CompressedInputStream(file, "zstd"), _BUFFER)
            case _:
                yield file


def _read_lines(file: IO[bytes], path: str) -> Iterator[RawRow]:
    """Read lines that end at line feeds alone: U+2028, U+2029 and U+0085 may stand inside a JSON text."""
    for number, line in enumerate(file, start=1):
        if not line.isspace():
            yield RawRow(path, ":", number, line)


def _read_json(file: IO[bytes], path: str) -> Iterator[RawRow]:
    """Read an array of objects element by element; what is no array is JSON Lines under another name."""
    start = file.read(1)
    while start.isspace() or start in (b"\xef", b"\xbb", b"\xbf"):
        start = file.read(1)
    file.seek(0)
    if start != b"[":
        yield from _read_lines(file, path)
        return
    with _as_text(file) as text:
        for number, content in enumerate(_elements(text, path), start=1):
            if not isinstance(content, dict):
                raise DataError(f"{path}, element {number}: not a JSON object", fix="each element is one JSON object")
            yield RawRow(path, ", element ", number, content)


@contextmanager
def _as_text(file: IO[bytes]) -> Iterator[IO[str]]:
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")
    try:
        yield text
    finally:
        text.detach()  # the file is closed by whoever opened it


def _elements(file: IO[str], path: str) -> Iterator[Any]:
    """Parse the elements of an array, of which only one and a buffer are in memory."""
    decoder = json.JSONDecoder()
    text = _more(file, path, 0).lstrip()[1:]
    separator = ""
    while True:
        text = text.lstrip()
        try:
            if text.startswith("]"):
                return
            if not text.startswith(separator):
                raise json.JSONDecodeError("a comma is missing", text, 0)  # noqa: TRY301 - as the decoder says it
            body = text.removeprefix(separator).lstrip()
            value, end = decoder.raw_decode(body)
        except json.JSONDecodeError as error:
            more = _more(file, path, len(text)) if len(text) < _MAX_CELL else ""
            if not more:
                raise _cut(path, error) from error
            text += more
            continue
        text, separator = body[end:], ","
        yield value


def _more(file: IO[str], path: str, length: int) -> str:
    """Read as much as there is already, so that a long element is parsed anew few times."""
    try:
        return file.read(max(_BUFFER, length))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8: {one_line(error)}", fix="convert it to UTF-8 with iconv") from error


def _read_csv(file: IO[bytes], path: str) -> Iterator[RawRow]:
    csv.field_size_limit(_MAX_CELL)
    line = 1
    with _as_text(file) as text:
        reader = csv.DictReader(text, delimiter="\t" if _suffix(path) == ".tsv" else ",", strict=True)
        try:
            for columns in reader:
                line = reader.line_num
                if None in columns or None in columns.values():
                    raise DataError(
                        f"{path}:{line}: {'more' if None in columns else 'fewer'} columns than the first line names",
                        meaning="a comma or a line break in a text needs quotes around it",
                        fix="correct this line, or write the file anew as JSON Lines",
                    )
                yield RawRow(path, ":", line, dict(columns))
        except csv.Error as error:
            raise DataError(f"{path}: after line {line}: not valid CSV: {error}", fix="correct this line") from error
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: after line {line}: not UTF-8: {one_line(error)}", fix="convert it to UTF-8 with iconv"
            ) from error


def _read_parquet(file: IO[bytes], path: str) -> Iterator[RawRow]:
    from pyarrow import parquet  # noqa: PLC0415 - heavy

    with _arrow_errors(path):
        yield from _table_rows(parquet.ParquetFile(file).iter_batches(_BATCH_ROWS), path)


def _read_arrow(file: IO[bytes], path: str) -> Iterator[RawRow]:
    import pyarrow as pa  # noqa: PLC0415 - heavy

    with _arrow_errors(path):
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if is_file:
            reader = pa.ipc.open_file(file)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            batches = iter(pa.ipc.open_stream(file))
        yield from _table_rows((part for batch in batches for part in _slices(batch)), path)


def _slices(batch: Any) -> Iterator[Any]:
    return (batch.slice(begin, _BATCH_ROWS) for begin in range(0, batch.num_rows, _BATCH_ROWS))


def _table_rows(batches: Iterator[Any], path: str) -> Iterator[RawRow]:
    number = 0
    for batch in batches:
        for columns in batch.to_pylist():
            number += 1
            yield RawRow(path, ", row ", number, columns)


@contextmanager
def _arrow_errors(path: str) -> Iterator[None]:
    import pyarrow as pa  # noqa: PLC0415 - heavy

    try:
        yield
    except pa.ArrowException as error:
        raise _cut(path, error) from error


_READERS: Mapping[str, Callable[[IO[bytes], str], Iterator[RawRow]]] = {
    ".jsonl": _read_lines,
    ".ndjson": _read_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}
"""How the files are read whose names end so; all others are JSON Lines."""
