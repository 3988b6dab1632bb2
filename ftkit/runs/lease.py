"""The lease of a run's folder: one trainer at a time, on any node.

Not every shared file system has locks, so this is a lease with a heartbeat. Leases are numbered files, and the
highest number is valid. A process takes the lease by creating the next number, at which exactly one of several
processes succeeds. The holder touches its file every few seconds; if the file does not change for long, the holder
counts as dead, and the next number may be taken. A holder that only seemed dead finds the higher number and ends.

Clocks of nodes differ, so ages are not compared between nodes: a process that waits for the lease watches for a touch.
On the holder's machine this takes no time, because the process can be looked up there.

A holder from an earlier start of the same Slurm job is not watched. Slurm starts a job or its next step only after the
previous processes have ended on every node that responds. A node that only lost Slurm's controller may still train, and
must end: the later start creates the next number immediately, removes the holder's file, and waits for two heartbeats
before it writes anything else. If the holder is alive, its next touch fails, also on NFS, and it ends. A holder that
can't reach the file system can't write to it either. A holder on the machine of the later start is killed: Slurm could
not end it, because its slurmstepd was killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ftkit import process
from ftkit.errors import TrainingError
from ftkit.files import InvalidJsonError, parse_json, to_json, write_json
from ftkit.runs.job import own_job_id

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout

BEAT_SECONDS = 10.0
NUM_MISSED_BEATS = 12
"""Missed heartbeats after which the holder counts as dead: file systems and Python's GIL can stall for a minute."""

_TAKEOVER_SECONDS = 2 * BEAT_SECONDS  # time in which a holder that is alive notices that its lease was taken over

_SURELY_DEAD_SECONDS = 600.0
"""Age in seconds by this machine's clock. Slurm's nodes can't communicate if their clocks differ by 5 minutes."""


class FolderHeldError(TrainingError):
    """Another process holds the run's folder. This process must not write anything there, not even this error."""


@dataclass(frozen=True)
class Holder:
    host: str
    machine: str  # identifies the machine and the process namespace of `pid`
    pid: int
    process_start: str  # distinguishes it from a later process with the same id
    job_id: str  # of Slurm; empty without it
    since: float  # seconds since the epoch
    start: tuple[int, int] = (0, 0)  # how often Slurm restarted the job, and the id of the job step since then

    @classmethod
    def here(cls) -> Holder:
        pid, job_id = os.getpid(), own_job_id()
        start = int(os.environ.get("SLURM_RESTART_COUNT", "0")), int(os.environ.get("SLURM_STEP_ID", "0"))
        return cls(socket.gethostname(), _machine(), pid, process.start_time(pid) or "", job_id, time.time(), start)

    def __str__(self) -> str:
        job = f"job {self.job_id}, " if self.job_id else ""
        since = datetime.fromtimestamp(self.since, UTC)
        return f"{job}process {self.pid} on {self.host}, since {since:%Y-%m-%d %H:%M:%S} UTC"


@dataclass(frozen=True)
class Released:
    """The content of a lease file after its holder has ended."""

    is_released: Literal[True]


@dataclass(frozen=True)
class Lease:
    """A lease as read. `content` is None between the file's creation and its first write."""

    number: int
    content: Holder | Released | None
    touched: float

    @property
    def holder(self) -> Holder | None:
        return self.content if isinstance(self.content, Holder) else None

    @property
    def is_local(self) -> bool:
        """Whether the holder is a process of this machine, which can be looked up."""
        return self.holder is not None and self.holder.machine == _machine()

    @property
    def is_running_here(self) -> bool:
        holder = self.holder
        return holder is not None and self.is_local and process.start_time(holder.pid) == holder.process_start

    def may_be_alive(self, max_silence: float = _SURELY_DEAD_SECONDS) -> bool:
        """Return whether the holder may still train, judged by one read on this machine."""
        if isinstance(self.content, Released):
            return False
        return self.is_running_here if self.is_local else time.time() - self.touched < max_silence

    def __str__(self) -> str:
        return str(self.holder or "another process")


def current_holder(layout: RunLayout) -> Holder | None:
    """Return the process that trains in a run's folder, for display: one read, which assumes synchronized clocks."""
    lease = _read_newest(layout.leases)
    return lease.holder if lease and lease.may_be_alive(NUM_MISSED_BEATS * BEAT_SECONDS) else None


def is_held_by_another_job(layout: RunLayout) -> bool:
    """Return whether a Slurm job other than this process's trains in the folder."""
    holder = current_holder(layout)
    return holder is not None and holder.job_id != own_job_id()


def last_touch(layout: RunLayout) -> float:
    """Return when the newest lease was touched, in seconds since the epoch; 0 if there is none."""
    lease = _read_newest(layout.leases)
    return lease.touched if lease else 0.0


def revoke(layout: RunLayout) -> None:
    """End the lease of a dead holder. If the holder is alive after all, it ends at its next heartbeat."""
    lease = _newest(layout.leases)
    if lease and not isinstance(lease.content, Released):
        with contextlib.suppress(FileExistsError):
            _create(layout.leases, lease.number + 1, Released(is_released=True))


def revoke_if_dead(layout: RunLayout) -> None:
    """End the lease of a dead process of this machine, so that the next start need not wait for its expiry."""
    lease = _read_newest(layout.leases)
    if lease and lease.is_local and not lease.is_running_here:
        with contextlib.suppress(OSError):
            revoke(layout)


# --- Hold a lease --------------------------------------------------------------------------------


@contextlib.contextmanager
def held_lease(
    layout: RunLayout,
    *,
    say: Callable[[str], None],
    on_loss: Callable[[FolderHeldError], None],
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[Callable[[], None]]:
    """Hold the lease of a run's folder; yield its heartbeat, which a thread calls.

    `say` gets the reason if taking the lease takes a while; `pause` sleeps for a number of seconds. `on_loss` is called
    in a separate thread when another process has taken over the lease; it must end this process. Raises
    `FolderHeldError` if another process holds the lease.
    """
    number = _take(layout.leases, say, pause)
    ended = threading.Event()

    def beat() -> None:
        if loss := _touch(layout.leases, number):
            on_loss(loss)

    def keep_beating() -> None:
        while not ended.wait(BEAT_SECONDS):
            beat()

    threading.Thread(target=keep_beating, name="lease", daemon=True).start()
    try:
        yield beat
    finally:
        ended.set()
        with contextlib.suppress(OSError):  # a lease that can't be released expires after this process
            write_json(_path(layout.leases, number), Released(is_released=True))  # the next holder need not wait


def _touch(folder: Path, number: int) -> FolderHeldError | None:
    """Touch the file of a lease; return the error if another process has taken it over."""
    is_there = True
    try:
        os.utime(_path(folder, number))
    except FileNotFoundError:
        is_there = False
        if not folder.is_dir():
            return None  # the folder is missing too: the file system is temporarily unavailable
    except OSError:
        return None  # the file system stalls: the next heartbeat detects a takeover
    newest = _read_newest(folder)
    if is_there and (newest is None or newest.number <= number):
        return None
    return FolderHeldError(
        f"the run's folder was taken over: {newest or 'another process'}",
        meaning="this process was suspended, or lost its file system, for minutes, and was considered dead",
        fix="do nothing if the other process is training; see its log",
    )


def _take(folder: Path, say: Callable[[str], None], pause: Callable[[float], None]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    newest, own = _newest(folder), Holder.here()
    replaced = None
    if newest is not None and newest.may_be_alive():
        former = newest.holder
        is_of_this_job = former is not None and former.job_id == own.job_id != ""
        if former is not None and is_of_this_job and former.start < own.start:
            if newest.is_running_here:
                say(f"ending {newest}: it is left from an earlier start of this job")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(former.pid, signal.SIGKILL)
            else:
                replaced = newest
        else:
            _wait_until_dead(folder, newest, say, pause)
    number = newest.number + 1 if newest else 1
    try:
        _create(folder, number, own)
    except FileExistsError:
        raise _refusal(_newest(folder)) from None
    newest = _newest(folder)
    if newest is not None and newest.number > number:  # other processes took and released it since the first read
        _path(folder, number).unlink(missing_ok=True)
        raise _refusal(newest)
    for lease in _numbers(folder):
        if lease < number:
            _path(folder, lease).unlink(missing_ok=True)
    if replaced is not None:
        say(f"the run's folder was held by {replaced}, from an earlier start of this job: waiting "
            f"{_TAKEOVER_SECONDS:.0f} s, so that it ends if its node only lost Slurm's controller")  # fmt: skip
        pause(_TAKEOVER_SECONDS)
    return number


def _wait_until_dead(folder: Path, lease: Lease, say: Callable[[str], None], pause: Callable[[float], None]) -> None:
    """Wait until a lease is certainly dead; raise FolderHeldError if it is alive."""
    if lease.is_running_here:
        raise _refusal(lease)
    seconds = NUM_MISSED_BEATS * BEAT_SECONDS
    say(f"the run's folder is held by {lease}: checking for up to {seconds:.0f} s whether it is still alive")
    for _ in range(NUM_MISSED_BEATS):
        pause(BEAT_SECONDS)
        now = _newest(folder)
        if now is None or not now.may_be_alive():
            return
        if (now.number, now.touched) != (lease.number, lease.touched):
            raise _refusal(now)


def _refusal(lease: Lease | None) -> FolderHeldError:
    return FolderHeldError(
        f"another process is training in this run's folder: {lease or 'another process'}",
        meaning="the run was submitted twice, or an earlier job of it did not end",
        fix="cancel that job, or wait until it ends; then: ftkit resume",
    )


# --- Files ---------------------------------------------------------------------------------------


def _read_newest(folder: Path) -> Lease | None:
    try:
        return _newest(folder)
    except OSError:  # another user's folder may not be readable
        return None


def _newest(folder: Path) -> Lease | None:
    while numbers := _numbers(folder):
        number, content = max(numbers), None
        try:
            # Opening the file makes NFS ask its server, which `stat` alone would not.
            with _path(folder, number).open(encoding="utf-8", errors="replace") as file:
                touched = os.fstat(file.fileno()).st_mtime
                text = file.read()
        except FileNotFoundError:  # the next holder has just removed it
            continue
        with contextlib.suppress(InvalidJsonError):
            content = parse_json(text, Holder | Released)  # type: ignore[arg-type] # mypy takes no union for a type
        return Lease(number, content, touched)
    return None


def _numbers(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names are all that is needed
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [int(match[1]) for name in names if (match := re.fullmatch(r"(\d+)\.json", name))]


def _create(folder: Path, number: int, content: Holder | Released) -> None:
    """Create a lease exclusively: only one process succeeds."""
    with _path(folder, number).open("x", encoding="utf-8") as file:
        file.write(to_json(content))


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 - no path, but a name
