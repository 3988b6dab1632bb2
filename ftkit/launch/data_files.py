"""The local files that a recipe names: whether they can be used, and whether they changed."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.config.data import FilesSource, HubSource
from ftkit.config.paths import is_path
from ftkit.data.formats import DETECTION_ROWS, read_example, resolve_format
from ftkit.data.rows import errors_at
from ftkit.data.sources import peek_rows
from ftkit.data.tasks.sql_score import read_question
from ftkit.errors import DataError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.config.recipe import RecipeSpec

MAX_FILES = 100_000
"""In a data set's folder; a walk through so many takes seconds."""
_EXAMPLES = ("data.source.train", "data.source.heldout")
_TOKENIZER_FILES = ("tokenizer*", "special_tokens*", "added_tokens*", "vocab*", "merges*", "chat_template*")


def data_stamp(recipe: RecipeSpec) -> str:
    """Return a value that changes when files that the prepared data depends on change.

    Raises:
        NotFoundError: a file may not be looked at, or a folder is too large to be a data set's.
    """
    stamps = []
    files = {file: key for key, path in local_paths(recipe) for file in _files_of(key, path)}
    for file, key in sorted(files.items()):
        about = _look_at(key, file)
        if about is not None:
            stamps.append(f"{file} {about.st_size} {about.st_mtime_ns}")
    return "\n".join(stamps)


def check_examples(recipe: RecipeSpec) -> None:
    """Check what can be known of the data at once: that files are files, and that their first rows can be used.

    Raises:
        NotFoundError: a file of examples is not there, or is a folder or a device.
        DataError: a row can't be used as the recipe asks; with file and line.
    """
    source = recipe.data.source
    for key, path in local_paths(recipe):
        about = _look_at(key, path) if key in _EXAMPLES else None
        if about is not None and not stat.S_ISREG(about.st_mode):
            raise NotFoundError(
                f"{key}: {path} is {'a folder' if stat.S_ISDIR(about.st_mode) else 'no ordinary file'}",
                fix=f"give a .jsonl file: {key}=FILE",
            )
    rows = peek_rows(source)
    form = resolve_format(recipe.data.format, rows[:DETECTION_ROWS]) if rows else recipe.data.format
    num_bad = 0
    for row in rows:
        try:
            with errors_at(row):
                read_example(row.columns, recipe.data, form)
        except DataError:
            num_bad += 1
            if num_bad > recipe.data.skip_bad:
                raise
    for row in rows[-1:] if recipe.evaluation.sql_execution else ():  # of the held-out file, where there is one
        with errors_at(row):
            read_question(row.columns)


def local_paths(recipe: RecipeSpec) -> Iterator[tuple[str, Path]]:
    """Yield the files and folders that a recipe names, each with its key."""
    source, model = recipe.data.source, recipe.model
    if isinstance(source, FilesSource):
        yield "data.source.train", Path(source.train)
        if source.heldout:
            yield "data.source.heldout", Path(source.heldout)
    if isinstance(source, HubSource) and is_path(source.dataset):
        yield "data.source.dataset", Path(source.dataset)
    if is_path(model.weights):
        yield "model.weights", Path(model.weights)
    if is_path(model.tokenizer.source):
        yield "model.tokenizer.source", Path(model.tokenizer.source)


def _files_of(key: str, path: Path) -> list[Path]:
    """Return the files that matter: of a model's folder, the tokenizer's; of a data set's folder, all."""
    about = _look_at(key, path)
    if about is None or not stat.S_ISDIR(about.st_mode):
        return [] if about is None else [path]
    if key in _EXAMPLES:
        return []
    if key == "data.source.dataset":
        return _all_files(key, path)
    return [file for pattern in _TOKENIZER_FILES for file in path.glob(pattern) if file.is_file()]


def _all_files(key: str, folder: Path) -> list[Path]:
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


def _look_at(key: str, path: Path) -> os.stat_result | None:
    """Return what is at a path; None if nothing is."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise NotFoundError(
            f"{key}: can't look at {path}: {error.strerror}",
            fix="check the path, and your rights on the folders that it is in",
        ) from error
