"""Find and remove unused folders of a workspace: failed runs without a checkpoint, and data that no run uses."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ftkit.errors import FtkitError, PrerequisiteError, one_line, plural
from ftkit.files import mapping, read_json_if_valid
from ftkit.launch.job_states import observe_all
from ftkit.launch.submission import check_removable
from ftkit.runs.checkpoints import list_checkpoints
from ftkit.runs.find import RunFolder, list_runs
from ftkit.runs.job import FAILURES, RunState
from ftkit.runs.lease import current_holder
from ftkit.runs.listing import read_entry
from ftkit.runs.manifest import Values

if TYPE_CHECKING:
    from ftkit.planning.layout import Workspace

_YOUNG_SECONDS = 24 * 3600  # newer prepared data may be waiting for its run


@dataclass(frozen=True)
class Prunable:
    """A folder that is no longer needed, and the reason; `folder` is the run, or None for prepared data."""

    kind: Literal["run", "data"]
    path: Path
    size_bytes: int
    reason: str
    folder: RunFolder | None = None


@dataclass(frozen=True)
class Findings:
    """Folders that can be removed, and reasons why others were not checked."""

    items: list[Prunable]
    warnings: list[str]
    images: list[Path]  # image files of runs that may still train, including damaged runs


def find_prunable(workspace: Workspace, *, with_checkpoints: bool = False, now: float | None = None) -> Findings:
    """Find the folders that can be removed, without removing them.

    `with_checkpoints` includes failed runs that could be resumed. Raises `PrerequisiteError` if the workspace can't be
    used.
    """
    entries = [read_entry(folder) for folder in list_runs(workspace)]
    overview = observe_all([entry.run for entry in entries if entry.run])
    items, warnings, used, unreadable = [], list(overview.warnings), set(), []
    now = time.time() if now is None else now
    for entry in entries:
        seen, root = overview.state_of(entry), entry.folder.layout.root
        has_ended_badly = seen.is_final and (seen.state in FAILURES or seen.state is RunState.CANCELED)
        checkpoints = list_checkpoints(entry.folder.layout) if has_ended_badly else []
        if has_ended_badly and (with_checkpoints or not checkpoints) and not current_holder(entry.folder.layout):
            left = plural(len(checkpoints), "checkpoint") if checkpoints else "no checkpoint"
            items.append(Prunable("run", root, folder_bytes(root), f"{seen.state}, {left}", entry.folder))
        elif entry.plan and entry.plan.fingerprint:
            used.add(entry.plan.fingerprint)
        elif entry.damage or not entry.folder.layout.is_script:
            unreadable.append(entry.folder.id)
    if unreadable:
        warnings.append(f"no prepared data is removed: can't read which data {', '.join(unreadable)} uses")
    else:
        items += _unused_data(workspace, used, now)
    items += _half_removed(workspace, now)
    training = (each for each in entries if each.damage or (each.run and not overview.state_of(each).is_final))
    return Findings(items, warnings, [each.plan.image_file for each in training if each.plan and each.plan.image_file])


def _unused_data(workspace: Workspace, used: set[str], now: float) -> Iterator[Prunable]:
    with suppress(OSError):
        for folder in sorted(workspace.data.iterdir()):
            is_unused = folder.is_dir() and not folder.is_symlink() and folder.name not in used
            age = now - folder.stat().st_mtime if is_unused else 0.0
            if age > _YOUNG_SECONDS and not folder.name.startswith("."):
                yield Prunable("data", folder, folder_bytes(folder), "no run uses it")


def _half_removed(workspace: Workspace, now: float) -> Iterator[Prunable]:
    """Find what interrupted removals left (`remove_folder`); newer ones may still be in progress."""
    kinds: dict[Literal["run", "data"], Path] = {"run": workspace.runs, "data": workspace.data}
    for kind, parent in kinds.items():
        for folder in sorted(parent.glob(".*.deleted")):
            with suppress(OSError):
                if now - folder.stat().st_mtime > _YOUNG_SECONDS:
                    yield Prunable(kind, folder, folder_bytes(folder), "an interrupted removal left it")


def find_dependents(workspace: Workspace, removed: Mapping[str, RunFolder]) -> dict[str, list[str]]:
    """Return, for each run to remove, other runs whose adapters were trained on its model."""
    found: dict[str, list[str]] = {}
    for folder in list_runs(workspace):
        recipe = mapping((read_json_if_valid(folder.layout.plan, Values) or {}).get("recipe"))
        weights = Path(str(mapping(recipe.get("model")).get("weights")))
        if folder.id not in removed and mapping(recipe.get("training")).get("method") != "full":
            for name in (name for name, other in removed.items() if weights.is_relative_to(other.layout.root)):
                found.setdefault(name, []).append(folder.id)
    return found


def prune(items: Sequence[Prunable]) -> int:
    """Remove folders and return the freed bytes. Keeps resumed runs; raises an `ExceptionGroup` if some remain."""
    freed, errors = 0, []
    for item in items:
        try:
            if item.folder:
                check_removable(item.folder)
            remove_folder(item.path)
            freed += item.size_bytes
        except FtkitError as error:
            errors.append(error)
    if errors:
        raise ExceptionGroup("some folders could not be removed", errors)
    return freed


def remove_folder(root: Path) -> None:
    """Remove a folder of the workspace. It is renamed first, so that no reader sees a partial folder.

    Raises `PrerequisiteError` if it can't be removed completely; if a folder in it is read-only, nothing is removed.
    """
    for folder, _, _ in os.walk(root):
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            raise PrerequisiteError(
                f"can't remove {root}: you may not change {folder}",
                meaning="it is read-only, or belongs to another user; nothing was removed",
                fix=f"if it is yours: chmod -R u+rwX {shlex.quote(str(root))}",
            )
    renamed = root.with_name(f".{root.name}.{secrets.token_hex(4)}.deleted")  # an earlier removal may have left one
    try:
        root.rename(renamed)
        os.utime(renamed)  # `_half_removed` finds it a day later
        shutil.rmtree(renamed)
    except OSError as error:
        raise PrerequisiteError(
            f"can't remove all of {root}: {one_line(error)}",
            meaning="the folder, or a file in it, belongs to another user",
            fix=f"list what is left: ls -la {shlex.quote(str(renamed if renamed.exists() else root))}",
        ) from error


def folder_bytes(folder: Path) -> int:
    """Return the size of all readable files of a folder, in bytes."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size
    return total
