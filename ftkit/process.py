"""Run programs, never through a shell, and functions that may hang; count CPUs. All programs but ftkit's start here."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from io import BufferedReader, TextIOWrapper
from itertools import takewhile
from pathlib import Path
from typing import IO, Final, NamedTuple, NoReturn, TypeVar, cast

from ftkit.errors import NoAnswerError, PrerequisiteError

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

_PR_SET_PDEATHSIG: Final = 1  # of Linux's prctl
_STOP_SECONDS: Final = 60  # time for an interrupted program to clean up
_CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def without_control(text: str) -> str:
    """Remove colors, and the control codes that nested bars use to move the cursor."""
    return _CONTROL.sub("", text)


def num_usable_cpus() -> int:
    """Return the number of CPUs of this process's allocation."""
    return len(os.sched_getaffinity(0))


def in_thread(function: Callable[[], ResultT]) -> Future[ResultT]:
    """Run a function in a daemon thread, which is left behind if it hangs, as in a dead file system."""
    future = Future[ResultT]()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended just before
        os._exit(1)


def visible_gpus(count: int, visible: str | None) -> list[str]:
    """Return the GPUs of `count` that a process may use, as `CUDA_VISIBLE_DEVICES` names them: by index, UUID or MIG.

    As CUDA reads it, the list ends at the first name of no GPU.
    """
    if visible is None:
        return [str(index) for index in range(count)]
    names = [name.strip() for name in visible.split(",")]
    indices = {str(index) for index in range(count)}
    return [*takewhile(lambda name: name in indices or name.startswith(("GPU-", "MIG-")), names)][:count]


class ProgramOutput(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class ProgramTimeoutError(NoAnswerError):
    """A program did not end in time."""

    def __init__(self, program: str, timeout_seconds: float, stderr: bytes = b"") -> None:
        # The last line says why it waits, as sbatch at MaxJobCount.
        last_line = stderr.decode(errors="replace").strip().rpartition("\n")[2]
        printed = f"; it printed: {last_line}" if last_line else ""
        super().__init__(
            f"'{program}' did not answer within {timeout_seconds:g} seconds{printed}",
            meaning="the service behind it is overloaded or down",
            fix="try again in a minute",
        )


# Each function that runs a program raises PrerequisiteError if it is not on PATH.


def _start(args: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
    log.debug("run %s", shlex.join(args))
    try:
        started: subprocess.Popen[bytes] = subprocess.Popen(list(args), **options)  # type: ignore[call-overload]
    except FileNotFoundError as error:
        if (folder := options.get("cwd")) is not None and not Path(str(folder)).is_dir():
            raise PrerequisiteError(
                f"can't run '{args[0]}': there is no folder {folder}",
                meaning="it was removed, or is on a file system that is not mounted here",
                fix="repeat the command where it exists",
            ) from error
        raise PrerequisiteError(
            f"the program '{args[0]}' was not found on PATH",
            meaning="it is not installed here, or you are logged in to another machine than you think",
            fix=f"install it, or log in where '{args[0]}' works",
        ) from error
    return started


def run(
    args: Sequence[str],
    *,
    timeout_seconds: float = 60,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ProgramOutput:
    """Run a program to its end and return its output, for any exit status.

    `environment` replaces this process's environment, which the program inherits if it is None. Raises
    ProgramTimeoutError: it did not end within `timeout_seconds`.
    """
    pipe = subprocess.PIPE
    with _start(args, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, cwd=cwd, env=environment) as started:
        try:
            outputs = started.communicate(timeout=timeout_seconds)
        except BaseException as error:
            started.kill()
            started.wait()  # `subprocess.run` does not, after Ctrl-C
            if isinstance(error, subprocess.TimeoutExpired):
                raise ProgramTimeoutError(args[0], timeout_seconds, error.stderr or b"") from error
            raise
    return ProgramOutput(started.returncode, *(each.decode(errors="replace") for each in outputs))


def run_stoppable(
    args: Sequence[str],
    *,
    timeout_seconds: float,
    environment: Mapping[str, str] | None = None,
    stop: Callable[[], object] | None = None,
) -> ProgramOutput:
    """Run a program that cleans up when it is interrupted; otherwise like `run`.

    The program leads a new process group, so that Ctrl-C reaches only this process. When this process is interrupted,
    or the time is over, it calls `stop`, sends SIGTERM to the group, waits until the group has ended, and kills the
    rest.
    """
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        started = _start(
            args, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment, start_new_session=True
        )
        try:
            started.wait(timeout_seconds)
        except BaseException as error:
            _end_group(started, stop)
            if isinstance(error, subprocess.TimeoutExpired):
                raise ProgramTimeoutError(args[0], timeout_seconds) from error
            raise
        return ProgramOutput(started.returncode, _content(stdout), _content(stderr))


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _end_group(leader: subprocess.Popen[bytes], stop: Callable[[], object] | None) -> None:
    """Terminate the group of `leader`, wait for it, and kill the rest; a second interruption kills immediately."""
    try:
        if stop:
            stop()
        signal_group(leader.pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        while time.monotonic() < deadline and (leader.poll() is None or group_members(leader.pid)):
            time.sleep(0.1)
    finally:
        signal_group(leader.pid, signal.SIGKILL)
        leader.wait()


@contextmanager
def running(args: Sequence[str], *, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, with its output in `log`, until the block ends; then end its process group."""
    with log.open("wb") as output:
        started = _start(args, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
    try:
        yield started
    finally:
        _end_group(started, None)


@contextmanager
def exit_on_termination() -> Iterator[list[int]]:
    """Raise `SystemExit` on SIGTERM and SIGHUP, so that this process cleans up; ignored signals stay ignored.

    Yields the numbers of the signals received so far, SIGINT included.
    """
    received: list[int] = []

    def exit_by(number: int, _: object) -> NoReturn:
        received.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    handled = {
        number: default
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
        if (default := signal.getsignal(number)) in (signal.SIG_DFL, signal.default_int_handler)
    }
    for number in handled:
        signal.signal(number, exit_by)
    try:
        yield received
    finally:
        for number, default in handled.items():
            signal.signal(number, default)


def run_with_input(
    args: Sequence[str], feed: Callable[[IO[bytes]], None], environment: Mapping[str, str] | None = None
) -> ProgramOutput:
    """Run a program to its end while `feed` writes its standard input; `environment` as for `run`.

    Its output and errors are both in the result's `stderr`. A program that ends early is not an error here: its exit
    status and message are more helpful than a broken pipe. It is killed if `feed` raises.
    """
    with tempfile.TemporaryFile() as output:
        with _start(args, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment) as started:
            try:
                with contextlib.suppress(BrokenPipeError):
                    feed(cast("IO[bytes]", started.stdin))
            except BaseException:
                started.kill()
                raise
            started.communicate()  # closes its input, which may be a broken pipe
        return ProgramOutput(started.returncode, "", _content(output))


def run_lines(args: Sequence[str], on_line: Callable[[str], None], *, cwd: Path) -> int:
    """Run a program to its end and pass on each line that it prints; return its exit status.

    Ctrl-C reaches the program too; this waits until it has cleaned up.
    """
    started = _start(args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=cwd)
    with started, TextIOWrapper(cast("BufferedReader", started.stdout), errors="replace") as lines:
        try:
            for line in lines:
                on_line(line.rstrip("\n"))
        except KeyboardInterrupt:
            for line in lines:
                on_line(line.rstrip("\n"))
            started.wait()
            raise
    return started.returncode


def run_attached(args: Sequence[str], stdout: int | None = None) -> int:
    """Run a program on this process's own terminal and streams; return its exit status, negative for a signal.

    `stdout` is the descriptor for its output: that of stderr, if stdout is for this process's data.
    """
    with _terminated_with_this(_start(args, stdout=stdout)) as started:
        return started.wait()


def run_passing(args: Sequence[str], stdin: bytes | None, on_output: Callable[[bytes], None]) -> int:
    """Run a program with `stdin`, and pass on its output immediately; return its exit status like `run_attached`.

    With None, its stdin is this process's. Its stderr is this process's stderr.
    """
    started = _start(args, stdin=None if stdin is None else subprocess.PIPE, stdout=subprocess.PIPE)
    with _terminated_with_this(started):
        if started.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # its exit status is more helpful
                started.stdin.write(stdin or b"")
                started.stdin.flush()
            with contextlib.suppress(BrokenPipeError):
                started.stdin.close()
        while started.stdout and (chunk := os.read(started.stdout.fileno(), 2**16)):
            on_output(chunk)
    return started.returncode


@contextmanager
def _terminated_with_this(started: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Wait for a program at the end of the block; terminate it if the block raises, as SIGTERM and SIGHUP do.

    Otherwise this process would wait for a program that does not know that it should end.
    """
    with started:
        try:
            yield started
        except BaseException:
            started.terminate()
            raise


def start_detached(args: Sequence[str], *, log: Path, cwd: Path, environment: Mapping[str, str]) -> int:
    """Start a program that outlives this one and its terminal; return its process id.

    Its output is appended to `log`. It leads a new process group, to which signals can be sent.
    """
    with log.open("ab") as output:
        started = _start(
            args, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd=cwd,
            env=dict(environment),
        )  # fmt: skip
    started.returncode = 0  # no process waits for it; without this its destructor would warn
    return started.pid


def _status_fields(pid: int | str) -> list[str] | None:
    """Return the fields of /proc/PID/stat (proc(5)) after the name; None if the process has ended, as a zombie has."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - hot path
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields


def kernel_state(pid: int) -> str:
    """Return the state of a process as proc(5) abbreviates it, such as T for stopped; empty if it has ended."""
    fields = _status_fields(pid)
    return fields[0] if fields else ""


def start_time(pid: int) -> str | None:
    """Return a value that distinguishes a process from a later one with the same id; None if it has ended.

    It is the start time in clock ticks.
    """
    fields = _status_fields(pid)
    return fields[19] if fields else None


def system_start() -> float:
    """Return when this machine, or the container around this process, was started: the start of its process 1."""
    with open("/proc/stat", encoding="utf-8") as file:  # noqa: PTH123 - as above
        booted = next(float(line.split()[1]) for line in file if line.startswith("btime "))
    return booted + int(start_time(1) or 0) / os.sysconf("SC_CLK_TCK")


def group_members(pid: int) -> list[int]:
    """Return the processes of the group that `pid` leads or led, without zombies."""
    pids = [name for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 - names are all that is needed
    return [int(each) for each in pids if (fields := _status_fields(each)) and fields[2] == str(pid)]


def signal_group(pid: int, signal_number: int) -> None:
    """Send a signal to the process group that `pid` leads; do nothing if the group has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal_number)


_SLURM_CLIENT_VARIABLES: Final = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_CONF_SERVER"}
"""SLURM_* variables that configure Slurm's programs, rather than describe an enclosing job."""
_CHANGING_SLURM: Final = ("SLURM_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_")
IGNORED_SBATCH_VARIABLES: Final = frozenset([
    "SBATCH_ARRAY_INX", "SBATCH_CLUSTERS", "SBATCH_ERROR", "SBATCH_INPUT", "SBATCH_NO_KILL", "SBATCH_NO_REQUEUE",
    "SBATCH_OPEN_MODE", "SBATCH_OUTPUT", "SBATCH_REQUEUE", "SBATCH_SIGNAL", "SBATCH_WAIT",
])  # fmt: skip
"""Variables that contradict how ftkit submits and follows a job: one job, with its log in the run's folder, on the
cluster that squeue asks, that is told to stop and requeued."""


SLURM_NO_ANSWER = (
    "contact slurm controller|timed out|connection (refused|reset|rejected|forced closed)|unable to connect|"
    "zero bytes were|not connected|message (send|receive) failure|unexpected message|insane message|socket error|"
    "broken pipe|communication (connection|shutdown) failure|header lengths|standby mode|rate limit"
)
"""Messages after which a job or step may exist: Slurm's protocol failed, or its answer is lost; for re and grep -E."""


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for Slurm's programs.

    It lacks the variables of an enclosing job and those that change what the programs do or print; times are printed as
    epoch seconds.
    """
    removed = {key for key in environment if key.startswith(_CHANGING_SLURM)} - _SLURM_CLIENT_VARIABLES
    removed |= IGNORED_SBATCH_VARIABLES
    kept = {key: value for key, value in environment.items() if key not in removed}
    return kept | {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
