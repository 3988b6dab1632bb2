"""Copy the data of a recipe to an object store or a folder, from where any machine can read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ftkit.config.data_sources import GeneratedSource, HubSource
from ftkit.data.selection import load_from_hub
from ftkit.data.source_files import find_files
from ftkit.errors import DataError, PrerequisiteError
from ftkit.paths import fixed_folder, is_address, is_pattern
from ftkit.runs.storage import Store, upload_file

if TYPE_CHECKING:
    from ftkit.config.data import DataSpec

Report = Callable[[str], None]


def upload_data(data: DataSpec, destination: str, report: Report) -> dict[str, object]:
    """Copy files and datasets of the hub below an address; return the recipe's keys that then read the copies.

    The same rows are trained on, in the same order. Existing copies stay; data that is at an address already, too.
    Raises DataError: a task generates the rows, or they can't be read; PrerequisiteError: the address can't be written
    to, or has another file of that name.
    """
    place = destination.rstrip("/") if is_address(destination) else str(Path(destination).absolute())
    is_list = len(data.sources) > 1
    sources = []
    for number, source in enumerate(data.sources):
        if isinstance(source, GeneratedSource):
            raise DataError("the recipe's task generates its rows", fix="copy nothing: each preparation generates them")
        key, below = (f"data.source[{number}]", f"{place}/{number}") if is_list else ("data.source", place)
        values: dict[str, object] = source.model_dump(exclude_defaults=True)
        if isinstance(source, HubSource):
            for name in ("dataset", "subset", "split", "revision"):
                values.pop(name, None)
            values |= {"kind": "files", "train": _upload_dataset(source, below, report)}
        else:
            values["train"] = _upload_files(source.train, f"{key}.train", below, report)
            if source.heldout is not None:
                values["heldout"] = _upload_files(source.heldout, f"{key}.heldout", f"{below}/heldout", report)
        sources.append(values)
    changes: dict[str, object] = {"data.source": sources if is_list else sources[0]}
    if data.validation is not None and data.validation.file is not None:
        key = "data.validation.file"
        changes[key] = _upload_files(data.validation.file, key, f"{place}/validation", report)
    return changes


def _upload_files(place: str, key: str, address: str, report: Report) -> str:
    """Copy the files of a path, folder or pattern, with their paths below it; return what finds the copies."""
    if is_address(place):
        report(f"{place} is at an address already")
        return place
    base = fixed_folder(place) if is_pattern(place) else Path(place).parent
    for file in find_files(place, key):
        _upload(Path(file), address, Path(file).relative_to(base).as_posix(), report)
    return f"{address}/{Path(place).relative_to(base).as_posix()}"


def _upload_dataset(source: HubSource, address: str, report: Report) -> str:
    name = "-".join((*source.name.split("/"), source.split)) + ".parquet"
    with TemporaryDirectory() as folder:
        path = Path(folder, name)
        load_from_hub(source).to_parquet(path)
        _upload(path, address, name, report)
    return f"{address}/{name}"


def _upload(path: Path, address: str, name: str, report: Report) -> None:
    store = Store(address)
    if name not in store.sizes():
        upload_file(path, store, name, report)
    elif not store.holds(name, path):
        raise PrerequisiteError(
            f"{store.address}/{name} has other content than {path.name} here",
            meaning="the data has changed, or another file has this name; ftkit replaces nothing there",
            fix="give another address",
        )
