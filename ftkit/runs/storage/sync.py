"""Copy runs to a store while they train, and fetch a copy to continue it on another machine.

The copy runs in a separate process, so that training never waits for the store:
`python -m ftkit.runs.storage.sync RUN_FOLDER DESTINATION` copies a run until SIGTERM, or until its trainer ends.

Complete checkpoints, exports, and the small files about the run are copied. A checkpoint's marker is copied last, so a
copied checkpoint with its marker is complete. Nothing is deleted from the copy.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.errors import FtkitError, NotFoundError, PrerequisiteError, one_line, redact
from ftkit.files import atomic_folder, file_lock_if_supported, read_json_if_valid, write_file, write_json
from ftkit.models.folder import EXPORT_RECORD
from ftkit.planning.layout import RunLayout, Workspace
from ftkit.planning.plan import plan_to_json, read_plan
from ftkit.runs.checkpoints import MARKER, DamagedCheckpointError, find_damage, read_marker
from ftkit.runs.metrics_file import read_last_record
from ftkit.runs.progress import list_checkpoints
from ftkit.runs.records import EndRecord
from ftkit.runs.storage.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ftkit.planning.plan import RunPlan

log = logging.getLogger(__name__)
POLL_SECONDS = 10.0
_STOP_POLL_SECONDS = 1.0
_LOWEST_PRIORITY = 19
_MAX_WAIT_SECONDS = 900.0
"""Maximum wait for the copy after training; GPUs are idle meanwhile."""
_MAX_PAUSE_SECONDS = 300.0
_SMALL_FILES = ("manifest.json", "metrics.jsonl")


@dataclass(frozen=True)
class SyncStatus:
    """Progress of a run's copy: sync.json.

    Attributes:
        destination: the address of the run's copy.
        time: when this was written, in seconds since the epoch.
        host: the machine of the process that copies.
        done: checkpoints and exports that are copied completely.
        waiting: those that are not copied yet.
        error: why the last attempt failed; it will be retried.
    """

    destination: str
    time: float
    host: str
    done: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    error: str | None = None


def read_status(layout: RunLayout) -> SyncStatus | None:
    """Return the progress of a run's copy; None if it is not copied."""
    return read_json_if_valid(layout.sync, SyncStatus)


class RunCopy:
    """The copy of a run."""

    def __init__(self, layout: RunLayout, destination: str, report: Callable[[str], None]) -> None:
        """Prepare to copy; nothing is copied yet.

        Args:
            layout: the run's folder.
            destination: the folder or prefix under which copies of runs are, each by its run's id.
            report: called with one line for each file that is copied.
        """
        self._layout = layout
        self._address = f"{destination.rstrip('/')}/{layout.root.name}"
        self._report = report
        digest = hashlib.sha256(self._address.encode()).hexdigest()
        self.lock = layout.root / f".sync-{digest[:12]}.lock"
        """Held by the process that copies the run to this destination."""
        self._done: set[str] = set()
        self._versions: dict[str, tuple[int, float]] = {}

    def update(self) -> SyncStatus:
        """Copy new files; record the progress, or the error."""
        error = None
        try:
            with self._lock():
                self._copy(Store(self._address))
        except (FtkitError, OSError) as problem:
            error = redact(_reason(problem), os.environ)
        waiting = [name for name in self._folders() if name not in self._done]
        done = tuple(sorted(self._done))
        status = SyncStatus(self._address, time.time(), socket.gethostname(), done, tuple(waiting), error)
        write_json(self._layout.sync, status)
        return status

    def follow(self, is_over: Callable[[], bool], wait: Callable[[float], object]) -> SyncStatus:
        """Update the copy until the run has ended and the copy is complete.

        The pause doubles with each error. After the run's end, there is one last update, even if it fails.

        Args:
            is_over: returns whether the run's files are final.
            wait: sleeps for a number of seconds, or until the run has ended.
        """
        pause = POLL_SECONDS
        while True:
            was_over = is_over()  # read before the update, which copies everything written until then
            status = self.update()
            if was_over:
                return status
            pause = min(2 * pause, _MAX_PAUSE_SECONDS) if status.error else POLL_SECONDS
            wait(pause)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Let one process at a time copy the run to this destination: another one waits, and finds the files there.

        Without locks in the file system, both copy the same files, which is slower.
        """
        waits = partial(
            self._report, f"another 'ftkit runs sync' or the run itself copies it to {self._address}: waiting"
        )
        with file_lock_if_supported(self.lock, waits):
            yield

    def _folders(self) -> dict[str, Path]:
        """Return checkpoints, the newest first, and exports, by their names in the copy."""
        layout = self._layout
        found = {f"checkpoints/{folder.name}": folder for _, folder in reversed(list_checkpoints(layout))}
        exports = [layout.export, *sorted(layout.exports.glob("[!.]*"))]
        return found | {
            folder.relative_to(layout.root).as_posix(): folder
            for folder in exports
            if (folder / EXPORT_RECORD).is_file()
        }

    def _copy(self, store: Store) -> None:
        layout = self._layout
        small = [layout.plan, layout.manifest, layout.script, layout.preparation_script, layout.metrics]
        for path in small:
            self._copy_if_changed(path, store)
        for name, folder in self._folders().items():
            if name in self._done:
                continue
            try:
                self._copy_folder(name, folder, store)
            except FileNotFoundError:  # the trainer has deleted an older checkpoint
                continue
            self._done.add(name)

    def _copy_if_changed(self, path: Path, store: Store) -> None:
        try:
            stat = path.stat()
        except FileNotFoundError:
            return
        if self._versions.get(path.name) != (stat.st_size, stat.st_mtime):
            store.put(path, path.name)
            self._versions[path.name] = stat.st_size, stat.st_mtime

    def _copy_folder(self, name: str, folder: Path, store: Store) -> None:
        last = MARKER if (folder / MARKER).is_file() else EXPORT_RECORD
        inside = Store(f"{store.address}/{name}")
        if inside.holds(last, folder / last):
            return
        files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.name == last)
        upload({path.relative_to(folder).as_posix(): path for path in files}, inside, self._report)


def check_destination(destination: str) -> None:
    """Check that runs can be copied to a destination.

    Raises:
        PrerequisiteError: a package or credentials are missing, or it can't be written to.
    """
    try:
        Store(destination).check_writable()
    except FtkitError as error:
        raise PrerequisiteError(f"sync: {error.what}", meaning=error.meaning, fix=error.fix) from error


def _reason(problem: FtkitError | OSError) -> str:
    """Return why a copy failed and what to do, such as the package to install or the credentials to set."""
    if isinstance(problem, FtkitError):
        return "; ".join(part for part in (problem.what, problem.fix) if part)
    return one_line(problem)


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


def fetch_run(address: str, workspace: Workspace, report: Callable[[str], None]) -> RunPlan:
    """Download a run with its newest complete checkpoint into a workspace; return its plan there.

    An existing checkpoint is not downloaded again.

    Raises:
        NotFoundError: there is no run.
        PrerequisiteError: it can't be read, or the copy is damaged.
        PlanError: its plan can't be read.
    """
    store = Store(address)
    names = store.sizes()
    if "plan.json" not in names:
        raise missing_copy(address)
    layout = RunLayout(workspace.runs / store.address.rpartition("/")[2])
    markers = (re.fullmatch(rf"checkpoints/step-(\d{{1,18}})/{MARKER}", name) for name in names)
    steps = [int(match[1]) for match in markers if match]
    layout.logs.mkdir(parents=True, exist_ok=True)
    newest = max(steps, default=0)
    local = max((step for step, _ in layout.list_checkpoints()), default=0)
    if local <= newest:
        for name in ("plan.json", *(name for name in _SMALL_FILES if name in names)):
            store.get(name, layout.root / name)
    if local < newest:
        report(f"copying the checkpoint of step {newest}")
        _fetch_checkpoint(store, newest, layout.checkpoint(newest), names)
    plan = read_plan(layout)
    plan = replace(plan, workspace=workspace.root, python=_python_here(plan))
    write_file(layout.plan, plan_to_json(plan).encode())
    return plan


def missing_copy(address: str) -> NotFoundError:
    """Return the error for an address without a copy of a run."""
    return NotFoundError(
        f"there is no copy of a run at {address}",
        meaning="a copy has a plan.json; it is written by 'ftkit runs sync', under the run's id",
        fix="give the address with the run's id: s3://bucket/runs/RUN",
    )


def _python_here(plan: RunPlan) -> str:
    return sys.executable if plan.cluster.runtime == "none" else plan.python


def _fetch_checkpoint(store: Store, step: int, folder: Path, names: dict[str, int]) -> None:
    prefix = f"checkpoints/{folder.name}/"
    with atomic_folder(folder) as temporary:
        for name in names:
            if name.startswith(prefix):
                store.get(name, temporary / name.removeprefix(prefix))
        try:
            marker = read_marker(temporary, step)
            damaged = find_damage(temporary, marker, marker.files)
        except DamagedCheckpointError as error:
            damaged = [str(error)]
        if damaged:
            raise PrerequisiteError(
                f"the copy of the checkpoint of step {step} at {store.address} is damaged: {', '.join(damaged[:3])}",
                meaning="files there were changed or removed",
                fix="repeat the command; or copy an older checkpoint manually",
            )


# --- While a run trains --------------------------------------------------------------------------


@contextmanager
def copied_while_trained(plan: RunPlan) -> Iterator[None]:
    """Copy a run to its recipe's `sync` address while the block trains it.

    If the run completes, wait for the rest of the copy. After a stop request, don't wait: the job's time is up, and the
    next job copies the rest. The copying process ends if this one is killed.
    """
    layout, destination = plan.layout, plan.recipe.sync
    if destination is None:
        yield
        return
    copying = _start_copying(layout, destination)
    try:
        yield
    finally:
        copying.send_signal(signal.SIGTERM)
        if _is_completed(layout):
            log.info("waiting for the copy of the run in %s", destination)
            try:
                copying.wait(_MAX_WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                log.warning("the copy is not complete: continue it with 'ftkit runs sync %s'", plan.id)


def _start_copying(layout: RunLayout, destination: str) -> subprocess.Popen[bytes]:
    layout.logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ftkit.runs.storage.sync", str(layout.root), destination]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "FTKIT_COPIED_PROCESS": str(os.getpid())}
    with layout.sync_log.open("ab") as output:
        # In a new session: a signal to the trainer must not end it in the middle of a file.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )


def _is_completed(layout: RunLayout) -> bool:
    last = read_last_record(layout.metrics)
    return isinstance(last, EndRecord) and last.outcome == "completed"


def main(folder: str, destination: str, trainer: int) -> int:
    """Copy a run; return 1 if the copy is incomplete at the end."""
    os.nice(_LOWEST_PRIORITY)
    stop_requested = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop_requested.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # inherited from the rank, which blocks it

    def is_over() -> bool:
        return stop_requested.is_set() or os.getppid() != trainer

    def wait(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not is_over():
            stop_requested.wait(_STOP_POLL_SECONDS)

    copy = RunCopy(RunLayout(Path(folder)), destination, _say)
    status = copy.follow(is_over, wait)
    if status.error:
        _say(f"not copied: {status.error}")
    return int(status.error is not None)


def _say(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(os.environ.get("FTKIT_COPIED_PROCESS", os.getppid()))))
