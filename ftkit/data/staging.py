"""Prepare a run: its data, and its weights, which are exported or downloaded, and staged on each node's local disk.

Of a staged copy there is one per node, verified at each start and shared by the node's ranks.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit import process
from ftkit.errors import NotFoundError, PrerequisiteError, one_line
from ftkit.files import atomic_folder, read_json_if_valid, remove, sha256_of, write_json
from ftkit.hub.client import find_folder, is_fetched
from ftkit.hub.readiness import check_weights, download_weights
from ftkit.models.folder import SMALL_FILES
from ftkit.models.weight_files import UNREADABLE, weight_files
from ftkit.paths import is_path
from ftkit.planning.layout import RunLayout, Workspace
from ftkit.runs.checkpoints import MARKER, SavedFile

if TYPE_CHECKING:
    from ftkit.planning.plan import RunPlan

STAGED = "FTKIT_STAGED_WEIGHTS"
"""Environment variable with the folder of the weights on the node's local disk."""
_MARKER = "ftkit-staged.json"
MAX_COPYING_NODES = 15
"""On more nodes, weights are not copied. N copies read the shared file system N times; ranks that read only their
shards read it about once in total. So a copy pays off after about N starts with the same weights on the same nodes
(docs/reference/many-nodes.md)."""
_THREADS = 8  # files copied in parallel: one stream does not saturate a parallel file system


def needs_preparation(plan: RunPlan, environment: Mapping[str, str]) -> bool:
    """Return whether a run on Slurm has to prepare data or weights; a local run's own script does that."""
    if plan.cluster.scheduler != "slurm":
        return False
    if not plan.data.is_prepared or plan.weights_to_export is not None:
        return True
    known, home = {**environment, **plan.cluster.environment}, Workspace(plan.workspace).hub_home
    return not all(is_fetched(model, known, home) for model in plan.recipe.models)


def prepare_here(
    plan: RunPlan, environment: Mapping[str, str], report: Callable[[str], None], num_workers: int | None = None
) -> None:
    """Prepare data and weights on this machine; PrerequisiteError if a package is missing, or as its callees."""
    missing = [name for name in ("datasets", "numpy", "tokenizers", "transformers") if find_spec(name) is None]
    if missing:
        raise PrerequisiteError(
            f"preparing data here needs {', '.join(missing)}",
            meaning="ftkit was installed without the packages for training",
            fix="pip install 'ftkit[train]'; or let a job do it: --prepare job",
        )
    from ftkit.data.prepare import prepare  # noqa: PLC0415 - seconds of imports

    export_weights(plan, report)
    prepare(plan, report, num_workers)
    fetch_weights(plan, environment, report)


def fetch_weights(plan: RunPlan, environment: Mapping[str, str], report: Callable[[str], None]) -> None:
    home = Workspace(plan.workspace).hub_home
    for model in plan.recipe.models:
        if not is_fetched(model, {**environment, **plan.cluster.environment}, home):
            report(f"downloading the weights of {model.weights}")
            download_weights(model, environment, home)
            if warning := check_weights(model, environment, home):
                report(f"warning: {warning}")


def export_weights(plan: RunPlan, report: Callable[[str], None]) -> None:
    trained = plan.weights_to_export
    if trained is None:
        return
    marker = RunLayout(Path(trained.folder).parents[1]).checkpoint(trained.step) / MARKER
    if not marker.is_file() or sha256_of(marker) != trained.sha256:
        raise NotFoundError(
            f"the checkpoint of step {trained.step} of {trained.run} no longer exists",
            meaning="the run deleted it (training.keep_checkpoints), or trained that step again, after this run's plan",
            fix=f"list its checkpoints, and submit again: ftkit runs checkpoints {trained.run}",
        )
    report(f"exporting the checkpoint of step {trained.step} of {trained.run}")
    command = [sys.executable, "-m", "ftkit", "export", trained.run, "--step", str(trained.step)]
    done = process.run_stoppable(
        [*command, "--to", trained.folder, "--no-verify"],
        timeout_seconds=24 * 3600.0,
        environment={**os.environ, "FTKIT_WORKSPACE": str(plan.workspace)},
    )
    if done.returncode:
        raise NotFoundError(
            f"the checkpoint of step {trained.step} of {trained.run} can't be exported: {one_line(done.stderr)}",
            fix=f"run it manually: ftkit export {trained.run} --step {trained.step} --to {trained.folder}",
        )


@dataclass(frozen=True)
class StagedFiles:
    """Size and SHA-256 of each file, as read from the shared file system."""

    source: str
    files: dict[str, SavedFile]


def stage_weights(plan: RunPlan, cache: Path, report: Callable[[str], object]) -> Path | None:
    """Copy a run's weights to this node's local disk, or verify an existing copy.

    `cache` is this user's folder on that disk. Returns the folder to load from; None to load from the shared file
    system, as without `stage: local` in the cluster profile.
    """
    model = plan.recipe.model
    if plan.cluster.stage != "local" or model.weights == "random":
        return None
    source = find_folder(model, os.environ, Workspace(plan.workspace).hub_home)
    if source is None or (is_path(model.weights) and not source.is_dir()):
        return None  # the ranks report why they can't be loaded
    found = {path for pattern in SMALL_FILES for path in source.glob(pattern)}
    with suppress(*UNREADABLE):  # the ranks refuse the copy of a damaged index
        found |= {source / file for file in weight_files(source)}  # not those in other layouts
    files = sorted(path for path in found if path.is_file())
    sizes = {path: path.stat() for path in files}
    lines = [f"{path.name} {stat.st_size} {stat.st_mtime_ns}" for path, stat in sizes.items()]
    began, host = time.monotonic(), socket.gethostname()
    folder = cache / "weights" / hashlib.sha256("\n".join([str(source), *lines]).encode()).hexdigest()[:32]
    damaged = _verify(folder)
    if damaged is None:
        report(f"{host}: weights are in {folder}, verified in {time.monotonic() - began:.1f} s")
        return folder
    if (num_nodes := plan.placement.num_nodes) > MAX_COPYING_NODES:
        if os.environ.get("SLURM_NODEID", "0") == "0":
            report(f"weights are not copied to {num_nodes} nodes: ranks read their shards from {source}")
        return None
    if damaged:
        report(f"{host}: the copy of the weights in {folder} is damaged ({', '.join(damaged)}): copying it again")
    size = sum(stat.st_size for stat in sizes.values())
    try:
        remove(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(folder.parent).free) < size:
            raise OSError(errno.ENOSPC, f"{free / 2**30:.1f} GiB are free")  # noqa: TRY301
        with atomic_folder(folder) as temporary, ThreadPoolExecutor(_THREADS) as threads:
            copied = dict(threads.map(lambda path: (path.name, _copy_file(path, temporary / path.name)), files))
            write_json(temporary / _MARKER, StagedFiles(str(source), copied))
    except OSError as error:
        report(
            f"{host}: {size / 2**30:.1f} GiB of weights can't be copied to {folder.parent} ({error.strerror}): "
            f"ranks read them from {source}. If copies of other models fill the disk, delete them"
        )
        return None
    seconds = time.monotonic() - began
    report(f"{host}: copied {size / 2**30:.1f} GiB of weights to {folder} in {seconds:.1f} s")
    return folder


def _verify(folder: Path) -> list[str] | None:
    """Return the damaged files of a copy; empty if there is no copy, None if the copy is intact."""
    staged = read_json_if_valid(folder / _MARKER, StagedFiles)
    if staged is None:
        return [_MARKER] if folder.is_dir() else []
    with ThreadPoolExecutor(_THREADS) as threads:
        intact = threads.map(lambda name: staged.files[name].is_content_of(folder / name), staged.files)
        return [name for name, is_same in zip(staged.files, intact, strict=True) if not is_same] or None


def _copy_file(path: Path, target: Path) -> SavedFile:
    """Copy a file; return size and digest of the bytes read."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as reader, target.open("wb") as writer:
        while chunk := reader.read(1 << 24):
            digest.update(chunk)
            writer.write(chunk)
            size += len(chunk)
    return SavedFile(size, digest.hexdigest())
