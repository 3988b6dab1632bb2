"""Upload files: resumable, verified by digest, and without deleting anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit.errors import PrerequisiteError
from ftkit.runs.storage.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


def upload(files: Mapping[str, Path], store: Store, report: Callable[[str], None]) -> int:
    """Copy missing files in order; return how many were copied.

    Args:
        files: by their names in the store. The last one marks the copy as complete.
        store: the destination.
        report: called with one line for each file that is copied.

    Raises:
        PrerequisiteError: the store can't be written to, or has other content than was written.
        FileNotFoundError: a local file no longer exists.
    """
    existing, num_copied = store.sizes(), 0
    for name, path in files.items():
        if existing.get(name) == path.stat().st_size and store.holds(name, path):
            continue
        report(f"copying {name}")
        store.put(path, name)
        if not store.holds(name, path):
            raise PrerequisiteError(
                f"{store.address}/{name} differs from what was written",
                meaning="the copy was damaged in transit, somebody else writes there, or the local file was changed",
                fix="repeat the command: existing files are not copied again",
            )
        num_copied += 1
    return num_copied


def push(folder: Path, address: str, last: str, report: Callable[[str], None]) -> None:
    """Copy an export to a folder or an object store.

    Args:
        folder: the export.
        address: the destination.
        last: name of the file that makes it an export; it is copied last.
        report: called with one line for each file that is copied.

    Raises:
        PrerequisiteError: the address has another export, or as `upload`.
    """
    store = Store(address)
    if last in store.sizes() and not store.holds(last, folder / last):
        raise PrerequisiteError(
            f"{address} already has another export",
            meaning="ftkit replaces and deletes nothing there",
            fix="give another address, for example with the step in its name",
        )
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    upload({name: folder / name for name in sorted(names, key=lambda name: name == last)}, store, report)
