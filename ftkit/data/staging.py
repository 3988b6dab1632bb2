"""Stage weights on a node's local disk: one copy per node, verified at each start, shared by the node's ranks."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftkit.files import atomic_folder, read_json_if_valid, remove, write_json
from ftkit.hub.client import find_folder
from ftkit.models.folder import SMALL_FILES
from ftkit.models.weight_files import UNREADABLE, weight_files
from ftkit.paths import is_path
from ftkit.planning.layout import Workspace
from ftkit.runs.checkpoints import SavedFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ftkit.planning.plan import RunPlan

STAGED = "FTKIT_STAGED_WEIGHTS"
"""Environment variable with the folder of the weights on the node's local disk."""
_MARKER = "ftkit-staged.json"
_CHUNK = 2**24
MAX_COPYING_NODES = 15
"""On more nodes, weights are not copied. N copies read the shared file system N times; ranks that read only their
shards read it about once in total. So a copy pays off after about N starts with the same weights on the same nodes
(docs/reference/many-nodes.md)."""
_THREADS = 8
"""Files copied in parallel: one stream does not saturate a parallel file system."""


@dataclass(frozen=True)
class StagedFiles:
    """Size and SHA-256 of each file, as read from the shared file system."""

    source: str
    files: dict[str, SavedFile]


def stage_weights(plan: RunPlan, cache: Path, report: Callable[[str], None]) -> Path | None:
    """Copy a run's weights to this node's local disk, or verify an existing copy.

    Args:
        plan: plan of the run; nothing is done unless its cluster profile sets `stage: local`.
        cache: this user's folder on the node's local disk.
        report: called with progress messages.

    Returns:
        The folder to load from; None to load from the shared file system.
    """
    model = plan.recipe.model
    if plan.cluster.stage != "local" or model.weights == "random":
        return None
    source = find_folder(model, os.environ, Workspace(plan.workspace).hub_home)
    if source is None or (is_path(model.weights) and not source.is_dir()):
        return None  # the ranks report why they can't be loaded
    files = _files_of(source)
    began, host = time.monotonic(), socket.gethostname()
    folder = cache / "weights" / _key(source, files)
    found = _verify(folder)
    if found is None:
        report(f"{host}: weights are in {folder}, verified in {time.monotonic() - began:.1f} s")
        return folder
    if (num_nodes := plan.placement.num_nodes) > MAX_COPYING_NODES:
        if os.environ.get("SLURM_NODEID", "0") == "0":
            report(f"weights are not copied to {num_nodes} nodes: ranks read their shards from {source}")
        return None
    if found:
        report(f"{host}: the copy of the weights in {folder} is damaged ({', '.join(found)}): copying it again")
    size = sum(path.stat().st_size for path in files)
    try:
        remove(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _copy(source, files, folder, size)
    except OSError as error:
        report(
            f"{host}: {size / 2**30:.1f} GiB of weights can't be copied to {folder.parent} ({error.strerror}): "
            f"ranks read them from {source}. If copies of other models fill the disk, delete them"
        )
        return None
    seconds = time.monotonic() - began
    report(f"{host}: copied {size / 2**30:.1f} GiB of weights to {folder} in {seconds:.1f} s")
    return folder


def _files_of(source: Path) -> list[Path]:
    """Return a model's files, without weights in other layouts that lie beside them."""
    found = {path for pattern in SMALL_FILES for path in source.glob(pattern)}
    with suppress(*UNREADABLE):  # the ranks refuse the copy of a damaged index
        found |= {source / file for file in weight_files(source)}
    return sorted(path for path in found if path.is_file())


def _key(source: Path, files: list[Path]) -> str:
    """Return the folder's name, which changes with the weights."""
    digest = hashlib.sha256(str(source).encode())
    for path in files:
        stat = path.stat()
        digest.update(f"\n{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:32]


def _verify(folder: Path) -> list[str] | None:
    """Return the damaged files of a copy; empty if there is no copy, None if the copy is intact."""
    staged = read_json_if_valid(folder / _MARKER, StagedFiles)
    if staged is None:
        return [_MARKER] if folder.is_dir() else []
    with ThreadPoolExecutor(_THREADS) as threads:
        intact = threads.map(lambda each: _is_intact(folder / each[0], each[1]), staged.files.items())
        return [name for name, is_intact in zip(staged.files, intact, strict=True) if not is_intact] or None


def _is_intact(path: Path, expected: SavedFile) -> bool:
    try:
        return SavedFile.of(path) == expected
    except OSError:
        return False


def _copy(source: Path, files: list[Path], folder: Path, size: int) -> None:
    if (free := shutil.disk_usage(folder.parent).free) < size:
        raise OSError(errno.ENOSPC, f"{free / 2**30:.1f} GiB are free")
    with atomic_folder(folder) as temporary, ThreadPoolExecutor(_THREADS) as threads:
        copied = dict(threads.map(lambda path: (path.name, _copy_file(path, temporary / path.name)), files))
        write_json(temporary / _MARKER, StagedFiles(str(source), copied))


def _copy_file(path: Path, target: Path) -> SavedFile:
    """Copy a file; return size and digest of the bytes read."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as reader, target.open("wb") as writer:
        while chunk := reader.read(_CHUNK):
            digest.update(chunk)
            writer.write(chunk)
            size += len(chunk)
    return SavedFile(size, digest.hexdigest())
