"""The local files and folders of a recipe, and a stamp that changes when they change."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.config.data import FilesSource, HubSource
from ftkit.config.paths import is_path
from ftkit.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.config.recipe import RecipeSpec

MAX_FILES = 100_000
"""In a data set's folder; a walk through so many takes seconds."""
EXAMPLE_KEYS = ("data.source.train", "data.source.heldout")
_TOKENIZER_FILES = ("tokenizer*", "special_tokens*", "added_tokens*", "vocab*", "merges*", "chat_template*")


def data_stamp(recipe: RecipeSpec) -> str:
    """Return a value that changes when files that the prepared data depends on change.

    Raises:
        NotFoundError: a file may not be looked at, or a folder is too large to be a data set's.
    """
    stamps = []
    files = {file: key for key, path in local_paths(recipe) for file in _files_of(key, path)}
    for file, key in sorted(files.items()):
        about = stat_path(key, file)
        if about is not None:
            stamps.append(f"{file} {about.st_size} {about.st_mtime_ns}")
    return "\n".join(stamps)


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
    about = stat_path(key, path)
    if about is None or not stat.S_ISDIR(about.st_mode):
        return [] if about is None else [path]
    if key in EXAMPLE_KEYS:
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


def stat_path(key: str, path: Path) -> os.stat_result | None:
    """Return the status of the file at a path; None if there is none.

    Raises:
        NotFoundError: the path can't be read.
    """
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise NotFoundError(
            f"{key}: can't read {path}: {error.strerror}",
            fix="check the path, and your permissions on its parent folders",
        ) from error
