"""Copy runs to a store while they train, and fetch a copy to continue it on another machine.

The copy runs in a separate process, so that training never waits for the store:
`python -m ftkit.runs.sync RUN_FOLDER DESTINATION` copies a run until SIGTERM, or until its trainer ends.

Complete checkpoints, exports, the user's code, and the small files about the run are copied. A checkpoint's marker is
copied last, so a copied checkpoint with its marker is complete. Nothing is deleted from the copy.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from ftkit.errors import FtkitError, NotFoundError, PrerequisiteError, one_line, redact
from ftkit.files import atomic_folder, files_in, read_json_if_valid, write_file, write_json
from ftkit.models.folder import EXPORT_RECORD
from ftkit.planning.layout import RunLayout, Workspace
from ftkit.planning.plan import PlanError, RunPlan, ScriptPlan, plan_to_json, read_job_plan
from ftkit.runs.checkpoints import MARKER, DamagedCheckpointError, find_damage, list_checkpoints, read_marker
from ftkit.runs.failure import original_command
from ftkit.runs.metrics_file import read_last_record
from ftkit.runs.records import EndRecord
from ftkit.runs.storage import Store, upload_folder

log = logging.getLogger(__name__)
POLL_SECONDS = 10.0
_STOP_POLL_SECONDS = 1.0
_LOWEST_PRIORITY = 19
_MAX_WAIT_SECONDS = 900.0  # maximum wait for the copy after training; GPUs are idle meanwhile
_MAX_PAUSE_SECONDS = 300.0


@dataclass(frozen=True)
class SyncStatus:
    """Progress of a run's copy at an address (sync.json), with the time and the host of the process that copies."""

    destination: str
    time: float
    host: str
    done: tuple[str, ...] = ()  # completely copied checkpoints and exports
    waiting: tuple[str, ...] = ()
    error: str | None = None  # of the last attempt; it will be retried


def read_status(layout: RunLayout) -> SyncStatus | None:
    """Return the progress of a run's copy; None if it is not copied."""
    return read_json_if_valid(layout.sync, SyncStatus)


class RunCopy:
    """The copy of a run. Two processes may safely copy to the same place; it is only slower."""

    def __init__(self, layout: RunLayout, destination: str, report: Callable[[str], None]) -> None:
        """Prepare to copy a run below `destination`, under its id; `report` gets a line for each copied file."""
        self._layout = layout
        self._address = f"{destination.rstrip('/')}/{layout.root.name}"
        self._report = report
        self._done: set[str] = set()
        self._versions: dict[str, tuple[int, float]] = {}

    def update(self) -> SyncStatus:
        """Copy new files; record the progress, or the error, if the run is this user's."""
        error = None
        try:
            self._copy(Store(self._address))
        except FtkitError as problem:  # its fix mentions the package to install or the credentials to set
            error = redact("; ".join(part for part in (problem.what, problem.fix) if part), os.environ)
        except OSError as problem:
            error = redact(one_line(problem), os.environ)
        waiting = tuple(name for name in self._folders() if name not in self._done)
        done = tuple(sorted(self._done))
        status = SyncStatus(self._address, time.time(), socket.gethostname(), done, waiting, error)
        with suppress(PermissionError):  # another user's run can be copied, but its folder is not writable
            write_json(self._layout.sync, status)
        return status

    def follow(self, is_over: Callable[[], bool], wait: Callable[[float], object]) -> SyncStatus:
        """Update the copy until the run has ended, and once more after that, even if an update fails.

        The pause doubles with each error. `wait` sleeps for a number of seconds, or until the run has ended.
        """
        pause = POLL_SECONDS
        while True:
            was_over = is_over()  # read before the update, which copies everything written until then
            status = self.update()
            if was_over:
                return status
            pause = min(2 * pause, _MAX_PAUSE_SECONDS) if status.error else POLL_SECONDS
            wait(pause)

    def _folders(self) -> dict[str, Path]:
        """Return the user's code, checkpoints, newest first, and exports, by their names in the copy."""
        layout = self._layout
        exports = [layout.export, *sorted(layout.exports.glob("[!.]*"))]
        folders = [
            *([layout.code] if layout.code.is_dir() else []),
            *(folder for _, folder in reversed(list_checkpoints(layout))),
            *(folder for folder in exports if (folder / EXPORT_RECORD).is_file()),
        ]
        return {folder.relative_to(layout.root).as_posix(): folder for folder in folders}

    def _copy(self, store: Store) -> None:
        layout = self._layout
        for path in (layout.plan, layout.manifest, layout.script, layout.preparation_script, layout.metrics):
            if not path.exists():
                continue
            version = path.stat().st_size, path.stat().st_mtime
            if self._versions.get(path.name) != version:
                store.put(path, path.name)
                self._versions[path.name] = version
        for name, folder in self._folders().items():
            if name in self._done:
                continue
            last = next((name for name in (MARKER, EXPORT_RECORD) if (folder / name).is_file()), "")
            inside = Store(f"{store.address}/{name}")
            try:
                sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files_in(folder)}
                if not (last and sizes.items() <= inside.sizes().items() and inside.holds(last, folder / last)):
                    upload_folder(folder, inside, last, self._report)
            except FileNotFoundError:  # the trainer has deleted an older checkpoint
                continue
            self._done.add(name)


def check_destination(destination: str) -> None:
    """Check that runs can be copied to a destination; raise PrerequisiteError if not."""
    try:
        Store(destination).check_writable()
    except FtkitError as error:
        raise PrerequisiteError(f"sync: {error.what}", meaning=error.meaning, fix=error.fix) from error


# --- Fetch a copy --------------------------------------------------------------------------------


class _DamagedCopyError(PrerequisiteError):
    """A copied checkpoint differs from what was written."""


def fetch_run(address: str, workspace: Workspace, report: Callable[[str], None]) -> RunPlan:
    """Download a run with its newest intact checkpoint unless it exists here; return its plan in this workspace.

    Raises `PlanError` if it ran a script.
    """
    store = Store(address)
    names = {name: size for name, size in store.sizes().items() if _is_below(name)}
    if "plan.json" not in names:
        raise missing_copy(address)
    layout = RunLayout(workspace.runs / store.address.rpartition("/")[2])
    markers = (re.fullmatch(rf"checkpoints/step-(\d{{1,18}})/{MARKER}", name) for name in names)
    steps = sorted((int(match[1]) for match in markers if match), reverse=True)
    local = max((step for step, _ in layout.list_checkpoints()), default=0)
    layout.logs.mkdir(parents=True, exist_ok=True)
    if local <= max(steps, default=0):
        code = [name for name in names if name.startswith(f"{layout.code.name}/")]
        for name in (layout.plan.name, layout.manifest.name, layout.metrics.name, *code):
            if name in names:
                store.get(name, layout.root / name)
    newer = [step for step in steps if step > local]
    for step in newer:
        report(f"copying the checkpoint of step {step}")
        try:
            _fetch_checkpoint(store, step, layout.checkpoint(step), names)
            break
        except _DamagedCopyError as error:
            report(error.what)
            if step == newer[-1]:
                raise
    plan = read_job_plan(layout)
    if isinstance(plan, ScriptPlan):
        raise PlanError(
            f"{plan.id} ran a script, so it can't be continued from a copy",
            meaning="a copy has the script, but not the checkpoints that it wrote",
            fix=f"start the script again, where it is: {original_command(layout)}",
            name="copy-of-script",
        )
    python = sys.executable if plan.cluster.runtime == "none" else plan.python
    plan = replace(plan, workspace=workspace.root, python=python)
    write_file(layout.plan, plan_to_json(plan).encode())
    return plan


def _is_below(name: str) -> bool:
    """Return whether a name in a store is a path below a folder: keys of objects may be any text."""
    path = PurePosixPath(name)
    return str(path) == name and not path.is_absolute() and ".." not in path.parts


def missing_copy(address: str) -> NotFoundError:
    return NotFoundError(
        f"there is no copy of a run at {address}",
        meaning="a copy has a plan.json; it is written by 'ftkit runs sync', under the run's id",
        fix="give the address with the run's id: s3://bucket/runs/RUN",
    )


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
            raise _DamagedCopyError(
                f"the copy of the checkpoint of step {step} at {store.address} is damaged: {', '.join(damaged[:3])}",
                meaning="files there were changed or removed",
                fix=f"remove {prefix} there, and copy the run again with 'ftkit runs sync'",
            )


# --- While a run trains --------------------------------------------------------------------------


@contextmanager
def copied_while_trained(plan: RunPlan) -> Iterator[None]:
    """Copy a run to its recipe's `sync` address while the block trains it.

    If the run completes, this waits for the rest of the copy. After a stop request it does not: the job's time is up,
    and the next job copies the rest. The copying process ends if this process is killed.
    """
    layout, destination = plan.layout, plan.recipe.sync
    if destination is None:
        yield
        return
    layout.logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ftkit.runs.sync", str(layout.root), destination]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "FTKIT_COPIED_PROCESS": str(os.getpid())}
    with layout.sync_log.open("ab") as output:
        # In a new session: a signal to the trainer must not end it in the middle of a file.
        copying = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        yield
    finally:
        copying.send_signal(signal.SIGTERM)
        last = read_last_record(layout.metrics)
        if isinstance(last, EndRecord) and last.outcome == "completed":
            log.info("waiting for the copy of the run in %s", destination)
            try:
                copying.wait(_MAX_WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                log.warning("the copy is not complete: continue it with 'ftkit runs sync %s'", plan.id)


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

    def say(text: str) -> None:
        sys.stdout.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        sys.stdout.flush()

    status = RunCopy(RunLayout(Path(folder)), destination, say).follow(is_over, wait)
    if status.error:
        say(f"not copied: {status.error}")
    return int(status.error is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(os.environ.get("FTKIT_COPIED_PROCESS", os.getppid()))))
