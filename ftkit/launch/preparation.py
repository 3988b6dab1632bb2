"""Inputs of a run before training: the recipe's local files, tokenized data, and weights in the hub's cache."""

from __future__ import annotations

import secrets
import stat
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.config.sources import HubSource
from ftkit.errors import NotFoundError, PrerequisiteError, UnreachableError
from ftkit.paths import fixed_folder, is_address, is_path, is_pattern

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping

    from ftkit.config.recipe import RecipeSpec
    from ftkit.planning.plan import RunPlan


def needs_preparation(plan: RunPlan, environment: Mapping[str, str]) -> bool:
    """Return whether a run on Slurm has to prepare data or weights; a local run's own script does that."""
    if plan.cluster.scheduler != "slurm":
        return False
    from ftkit.data.weights import are_weights_here  # noqa: PLC0415 - the hub's client

    return not plan.is_data_prepared or not are_weights_here(plan, environment)


def prepare_here(
    plan: RunPlan, environment: Mapping[str, str], report: Callable[[str], None], num_workers: int | None = None
) -> None:
    """Prepare data, and download or export weights, on this machine.

    Raises:
        PrerequisiteError: a required package is missing.
        DataError: the data can't be used with the recipe's settings.
        NotFoundError: the weights can't be downloaded or exported.
    """
    missing = [name for name in ("datasets", "numpy", "tokenizers", "transformers") if find_spec(name) is None]
    if missing:
        raise PrerequisiteError(
            f"preparing data here needs {', '.join(missing)}",
            meaning="ftkit was installed without the packages for training",
            fix="pip install 'ftkit[train]'; or let a job do it: --prepare job",
        )
    from ftkit.data.prepare import prepare  # noqa: PLC0415 - seconds of imports
    from ftkit.data.weights import export_weights, fetch_weights  # noqa: PLC0415 - the hub's client

    export_weights(plan, report)
    prepare(plan, report, num_workers)
    fetch_weights(plan, environment, report)


_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens*", "added_tokens*", "vocab*", "merges*", "chat_template*", "config.json",
    "generation_config.json",
)  # fmt: skip


def data_stamp(recipe: RecipeSpec) -> str:
    """Return a value that changes when files that the prepared data depends on change.

    It is never the same if a store can't be reached from here, so that no data of earlier files is taken for these.

    Raises:
        NotFoundError: a file can't be read or does not exist, or a folder is too large for a dataset.
        PrerequisiteError: a package or credentials for an address are missing.
    """
    stamps = [_stamp(place, key) for key, place in recipe.data.files if is_address(place)]
    keys = {key for key, _ in recipe.data.files}
    paths = [(key, path) for key, path in local_paths(recipe) if key not in keys]
    files = {file: key for key, path in paths for file in _files_of(key, path)}
    files |= {file: key for key, file in data_files(recipe)}
    for file, key in sorted(files.items()):
        about = stat_path(key, file)
        if about is not None:
            stamps.append(f"{file} {about.st_size} {about.st_mtime_ns}")
    return "\n".join(stamps)


def local_paths(recipe: RecipeSpec) -> Iterator[tuple[str, Path]]:
    """Yield the files and folders in a recipe, each with its key."""
    model = recipe.model
    for key, place in recipe.data.files:
        if not is_address(place):
            yield key, fixed_folder(place) if is_pattern(place) else Path(place)
    for source in recipe.data.sources:
        if isinstance(source, HubSource) and is_path(source.dataset):
            yield "data.source.dataset", Path(source.dataset)
    if is_path(model.weights):
        yield "model.weights", Path(model.weights)
    if is_path(model.tokenizer.source):
        yield "model.tokenizer.source", Path(model.tokenizer.source)


def data_files(recipe: RecipeSpec) -> Iterator[tuple[str, Path]]:
    """Yield the data files on this machine, each with its key."""
    for key, place in recipe.data.files:
        if not is_address(place):
            from ftkit.data.files import find_files  # noqa: PLC0415 - readers of all kinds of files

            yield from ((key, Path(file)) for file in find_files(place, key))


def _stamp(place: str, key: str) -> str:
    from ftkit.data.files import stamp  # noqa: PLC0415 - drivers of object stores

    try:
        return stamp(place, key)
    except UnreachableError:  # the checks warn
        return f"{place} {secrets.token_hex(8)}"


def _files_of(key: str, path: Path) -> list[Path]:
    """Return the files that the prepared data depends on: of a model, the tokenizer's; of a dataset, all."""
    about = stat_path(key, path)
    if about is None or not stat.S_ISDIR(about.st_mode):
        return [] if about is None else [path]
    if key == "data.source.dataset":
        from ftkit.data.files import walk  # noqa: PLC0415 - readers of all kinds of files

        return walk(path, key)
    return [file for pattern in _TOKENIZER_FILES for file in path.glob(pattern) if file.is_file()]


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
