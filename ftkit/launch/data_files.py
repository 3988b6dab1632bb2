"""The local files that a recipe names: whether they are there, and whether they changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.specs.data import FilesSource, HubSource
from ftkit.specs.paths import is_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.specs.recipe import RecipeSpec

_TOKENIZER_FILES = ("tokenizer*", "special_tokens*", "added_tokens*", "vocab*", "merges*", "chat_template*")


def data_stamp(recipe: RecipeSpec) -> str:
    """Return a value that changes when files that the prepared data depends on change."""
    stamps = []
    for file in sorted({file for _, path in named_paths(recipe) for file in _files_of(path)}):
        about = file.stat()
        stamps.append(f"{file} {about.st_size} {about.st_mtime_ns}")
    return "\n".join(stamps)


def named_paths(recipe: RecipeSpec) -> Iterator[tuple[str, Path]]:
    """Yield the files and folders that a recipe names, each with its key."""
    source, model = recipe.data.source, recipe.model
    if isinstance(source, FilesSource):
        yield "data.source.train", Path(source.train)
        if source.heldout:
            yield "data.source.heldout", Path(source.heldout)
    if isinstance(source, HubSource) and is_path(source.dataset):
        yield "data.source.dataset", Path(source.dataset).expanduser()
    if is_path(model.weights):
        yield "model.weights", Path(model.weights)
    if is_path(model.tokenizer.source):
        yield "model.tokenizer.source", Path(model.tokenizer.source)


def _files_of(path: Path) -> list[Path]:
    """Return the files that matter: of a model's folder, the tokeniser's; of a data set's folder, all."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    if (path / "config.json").is_file() or (path / "tokenizer.json").is_file():
        return [file for pattern in _TOKENIZER_FILES for file in path.glob(pattern) if file.is_file()]
    return [file for file in path.rglob("*") if file.is_file()]
