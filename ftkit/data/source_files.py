"""Find data files on this machine or at an address, decompress them, and read their rows."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from ftkit.data.readers import COMPRESSIONS, IN_FOLDERS, READERS, START_BYTES, check_kind, cut_error, suffix_of
from ftkit.errors import DataError, NotFoundError, PrerequisiteError, one_line
from ftkit.paths import is_address, is_pattern, neighbor_of
from ftkit.runs.storage import ADVICE, driver_errors, open_driver

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from ftkit.data.rows import RawRow

MAX_FILES: Final = 100_000
"""Maximum entries of a dataset's folder; walking that many takes seconds."""
_BUFFER = 1 << 20
OTHER_SPLIT = re.compile(r"(?:test|val|valid|validation|eval|dev|heldout|holdout)(?:[-_./]|$)", re.IGNORECASE)
"""Name prefixes of files and folders of other splits, as in datasets of the hub."""
_GIT_LFS: Final = b"version https://git-lfs"
"""Beginning of a Git LFS pointer, which a repository has in place of a large file."""
_WRITTEN = ({"manifest.json", "plan.json"}, {"manifest.json", "tokenizer", "train", "validation"})
"""Files that ftkit writes into the folder of a run and into a folder of prepared data, which are not datasets."""
_METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Metadata files that `datasets` writes."""


def find_files(place: str, key: str) -> list[str]:
    """Return the data files of a path, folder, pattern or address, sorted by name.

    Raises NotFoundError if there are none, and PrerequisiteError without a package or credentials for the address.
    """
    found = _find_remote(place, key) if is_address(place) else _find_local(place, key)
    first: dict[str, str] = {}
    for file in found:
        path = Path(file)
        plain = str(path.with_suffix("")) if path.suffix.lower() in COMPRESSIONS else file
        if (other := first.setdefault(plain, file)) != file:
            raise DataError(
                f"{key}: {place} has {Path(other).name} and {path.name}",
                meaning="one is a compressed copy of the other, and its rows would be read twice",
                fix="remove one of them, rename it if its rows are others, or list the files to read",
                name="compressed-copy",
            )
    return found


def _find_local(place: str, key: str) -> list[str]:
    path = Path(place)
    if is_pattern(place):
        found = sorted(file for file in glob(place, recursive=True) if Path(file).is_file())  # noqa: PTH207 - absolute patterns
    elif os.path.isdir(place):  # noqa: PTH112 - no error for a folder that can't be read; reading it reports it
        found = _train_files(place, [str(file) for file in walk(path, key)], key)
    else:
        found = [place]
    if not found:
        raise NotFoundError(
            f"{key}: {place} has no data files",
            meaning=f"looked for names that end in {', '.join(IN_FOLDERS)}, or these with {', '.join(COMPRESSIONS)}",
            fix="give a file, a folder of such files, or a pattern, such as 'texts/*.txt' for text",
        )
    return found


def walk(folder: Path, key: str) -> list[Path]:
    """Return all files of a dataset's folder. Links to folders are followed; a folder linked twice is read once.

    Folders that ftkit wrote are skipped: a workspace may be in the dataset's folder.
    """
    files: list[Path] = []
    seen = {folder.resolve()}
    num_seen = 0
    for where, folders, names in os.walk(folder, followlinks=True):
        below = sorted((Path(where, name) for name in folders), key=lambda path: (path.is_symlink(), path.name))
        is_written = Path(where) != folder and any(found <= {*folders, *names} for found in _WRITTEN)
        folders.clear()
        if is_written:
            continue
        for path in below:
            if path.resolve() not in seen:
                seen.add(path.resolve())
                folders.append(path.name)
        files += [Path(where, name) for name in names]
        num_seen += len(folders) + len(names)
        if num_seen > MAX_FILES:
            raise NotFoundError(
                f"{key}: there are more than {MAX_FILES:,} files and folders in {folder}",
                meaning="it is probably a parent of the dataset's folder",
                fix=f"give the dataset's own folder: {key}=PATH",
            )
    return files


def stamp(place: str, key: str) -> str:
    """Return a value that changes when the files at an address do. Raises as `find_files` does."""
    with driver_errors(place, "read", f"{key}: "):
        files, system = _find_remote(place, key), _file_system(place, key)
        infos = [(file, system.info(file)) for file in files]
    keys = ("size", "ETag", "etag", "md5Hash", "mtime", "LastModified", "blob_id")
    return "\n".join(f"{file} {[str(info[key]) for key in keys if info.get(key)]}" for file, info in infos)


def _train_files(folder: str, files: list[str], key: str) -> list[str]:
    """Return the data files of a folder, which must all belong to one split."""
    below = {file: Path(file).relative_to(folder) for file in files}
    found = sorted(
        file
        for file, path in below.items()
        if suffix_of(file) in IN_FOLDERS
        and path.name not in _METADATA
        and not any(part.startswith((".", "_")) for part in path.parts)
    )
    others = [below[file] for file in found if any(map(OTHER_SPLIT.match, below[file].parts))]
    train = [file for file in found if below[file] not in others]
    if others and train:
        raise DataError(
            f"{key}: {folder} has files of more than one split, such as {others[0]}",
            meaning="all files of a folder are trained on, so the test data would be too",
            fix=f"select those to train on by a pattern or list: {key}={train[0]}; others as data.validation.file",
            name="several-splits",
        )
    return found


def _find_remote(place: str, key: str) -> list[str]:
    system, scheme = _file_system(place, key), place.partition("://")[0]
    with driver_errors(place, "read", f"{key}: "):
        if has_magic(place):
            found = [file for file in system.glob(place) if not Path(file).name.startswith(".")]
        elif system.isdir(place):
            from fsspec.core import strip_protocol  # noqa: PLC0415 - heavy, and only needed for addresses

            found = _train_files(strip_protocol(place), system.find(place), key)
        else:
            found = [place] if system.exists(place) else []
    if not found:
        fix = "check the address, and your permissions"
        if scheme == "hf":  # which also answers this for private datasets
            fix = f"check the address; if the dataset is private or gated: {ADVICE['hf']}"
        raise NotFoundError(f"{key}: there is nothing at {place}", fix=fix)
    return sorted(file if is_address(file) else f"{scheme}://{file}" for file in found)


def _file_system(place: str, key: str) -> AbstractFileSystem:
    try:
        return open_driver(place.partition("://")[0])
    except PrerequisiteError as error:
        raise type(error)(f"{key}: can't read {place}: {error.what}", meaning=error.meaning, fix=error.fix) from error


def read_file(path: str, key: str = "data.source") -> Iterator[RawRow]:
    suffix = suffix_of(path)
    name, read = READERS.get(suffix, READERS[".jsonl"])
    try:
        with _open(path, key) as file:
            check_kind(file.peek(START_BYTES), path, name, suffix)
            yield from read(file, path)
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise cut_error(path, error) from error
    except OSError as error:
        if is_address(path):
            with driver_errors(path, "read", f"{key}: "):
                raise
        if not error.errno:  # raised by a decompressor
            raise cut_error(path, error) from error
        reason, fix = error.strerror or one_line(error), f"{neighbor_of(Path(path))}check {key}"
        kind = NotFoundError if isinstance(error, FileNotFoundError) else DataError
        raise kind(f"can't read {path}: {reason}", fix=fix) from error


def count_rows(path: str, key: str = "data.source") -> int:
    """Return the number of rows that `read_file` yields, from the file's metadata if it has a count."""
    if suffix_of(path) == ".parquet":
        import pyarrow.parquet  # noqa: PLC0415 - heavy

        with _open(path, key) as file:
            try:
                return int(pyarrow.parquet.ParquetFile(file).metadata.num_rows)
            except pyarrow.ArrowException as error:
                raise cut_error(path, error) from error
    return sum(1 for _ in read_file(path, key))


@contextmanager
def _open(path: str, key: str) -> Iterator[io.BufferedReader]:
    if is_address(path):
        with driver_errors(path, "read", f"{key}: "):
            # The file object of a driver reads lines slowly and without a limit.
            opened = io.BufferedReader(_file_system(path, key).open(path, "rb"), _BUFFER)
    else:
        mode = Path(path).stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # opening a pipe waits for its writer
            kind = "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
            raise DataError(
                f"{path} is {kind}, not a file",
                meaning="ftkit reads data several times: for the plan, for its identity, and for each preparation",
                fix="write it to a file, compressed if it is large",
            )
        opened = io.BufferedReader(Path(path).open("rb", buffering=0), _BUFFER)  # noqa: SIM115 - entered below
    with opened as file:
        if file.peek(len(_GIT_LFS)).startswith(_GIT_LFS):
            raise DataError(f"{path} is only a Git LFS pointer", fix="download the file itself: git lfs pull")
        suffix = Path(path).suffix.lower()
        if suffix in COMPRESSIONS:
            check_kind(file.peek(START_BYTES), path, f"a {suffix} file", suffix)
        match suffix:
            case ".gz":
                yield cast("io.BufferedReader", gzip.GzipFile(fileobj=file))
            case ".bz2":
                yield cast("io.BufferedReader", bz2.BZ2File(file))
            case ".xz":
                yield cast("io.BufferedReader", lzma.LZMAFile(file))  # noqa: SIM115 - of an open file
            case ".zst":
                import pyarrow as pa  # noqa: PLC0415 - heavy

                yield io.BufferedReader(pa.CompressedInputStream(file, "zstd"), _BUFFER)
            case _:
                yield file
