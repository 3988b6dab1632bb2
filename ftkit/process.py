"""Run programs, never through a shell, and count the CPUs for them. No other module starts programs."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final, NoReturn

from ftkit.errors import FtkitError, NoAnswerError, PrerequisiteError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

_STOP_SECONDS: Final = 60
"""Time for an interrupted program to clean up."""


_COLOR: Final = re.compile(r"\x1b\[[0-9;]*m")


def without_colors(text: str) -> str:
    """Remove color codes from a program's output."""
    return _COLOR.sub("", text)


def num_usable_cpus() -> int:
    """Return the number of CPUs of this process's allocation."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class ProgramOutput:
    """Exit status and output of a program that has ended."""

    returncode: int
    stdout: str
    stderr: str


class ProgramTimeoutError(FtkitError):
    """A program did not end in time."""

    exit_code = NoAnswerError.exit_code


def run(
    args: Sequence[str],
    *,
    timeout_seconds: float = 60,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ProgramOutput:
    """Run a program to its end and return its output, for any exit status.

    `environment` replaces this process's environment, which the program inherits if it is None.

    Raises:
        PrerequisiteError: the program is not on PATH.
        ProgramTimeoutError: it did not end within `timeout_seconds`.
    """
    started = _start(
        args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        cwd=cwd, env=environment,
    )  # fmt: skip
    with started:
        try:
            stdout, stderr = started.communicate(timeout=timeout_seconds)
        except BaseException as error:
            started.kill()
            started.wait()  # `subprocess.run` does not, after Ctrl-C
            if isinstance(error, subprocess.TimeoutExpired):
                raise _too_slow(args[0], timeout_seconds, error.stderr or b"") from error
            raise
    return ProgramOutput(started.returncode, stdout, stderr)


def _start(args: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a program, as `subprocess.Popen` does.

    Raises:
        PrerequisiteError: it is not on PATH.
    """
    log.debug("run %s", shlex.join(args))
    try:
        return subprocess.Popen(list(args), **options)
    except FileNotFoundError as error:
        raise _not_found(args[0]) from error


def _too_slow(program: str, timeout_seconds: float, stderr: bytes = b"") -> ProgramTimeoutError:
    said = stderr.decode(errors="replace").strip().rpartition("\n")[2]  # why it waits, as sbatch at MaxJobCount
    return ProgramTimeoutError(
        f"'{program}' did not answer within {timeout_seconds:g} seconds" + (f"; it printed: {said}" if said else ""),
        meaning="the service behind it is overloaded or down",
        fix="try again in a minute",
    )


def _not_found(program: str) -> PrerequisiteError:
    return PrerequisiteError(
        f"the program '{program}' was not found on PATH",
        meaning="it is not installed here, or you are logged in to another machine than you think",
        fix=f"install it, or log in where '{program}' works",
    )


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

    Raises:
        PrerequisiteError: the program is not on PATH.
        ProgramTimeoutError: it did not end within `timeout_seconds`.
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
                raise _too_slow(args[0], timeout_seconds) from error
            raise
        stdout.seek(0)
        stderr.seek(0)
        outputs = (stream.read().decode(errors="replace") for stream in (stdout, stderr))
        return ProgramOutput(started.returncode, *outputs)


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
def exit_on_termination() -> Iterator[None]:
    """Raise `SystemExit` on SIGTERM and SIGHUP, so that this process cleans up; ignored signals stay ignored."""

    def exit_by(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, exit_by)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)


def run_with_input(
    args: Sequence[str], feed: Callable[[IO[bytes]], None], environment: Mapping[str, str] | None = None
) -> ProgramOutput:
    """Run a program to its end while `feed` writes its standard input; `environment` as for `run`.

    Its output and errors are both in the result's `stderr`. A program that ends early is not an error here: its exit
    status and message are more helpful than a broken pipe. It is killed if `feed` raises.

    Raises:
        PrerequisiteError: the program is not on PATH.
    """
    with tempfile.TemporaryFile() as output:
        started = _start(args, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment)
        with started:
            stdin = started.stdin
            if stdin is None:
                raise AssertionError("stdin is a pipe")
            try:
                feed(stdin)
                stdin.close()
            except BrokenPipeError:
                with contextlib.suppress(BrokenPipeError):
                    stdin.close()
            except BaseException:
                started.kill()
                raise
        output.seek(0)
        return ProgramOutput(started.returncode, "", output.read().decode(errors="replace"))


def run_lines(args: Sequence[str], on_line: Callable[[str], None], *, cwd: Path) -> int:
    """Run a program to its end and pass on each line that it prints; return its exit status.

    Ctrl-C reaches the program too; this waits until it has cleaned up.

    Raises:
        PrerequisiteError: the program is not on PATH.
    """
    started = _start(
        args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        cwd=cwd,
    )  # fmt: skip
    with started:
        lines = started.stdout or ()
        try:
            for line in lines:
                on_line(line.rstrip("\n"))
        except KeyboardInterrupt:
            for line in lines:
                on_line(line.rstrip("\n"))
            started.wait()
            raise
    return started.returncode


def run_attached(args: Sequence[str]) -> int:
    """Run a program on this process's own terminal and streams; return its exit status, negative for a signal.

    Raises:
        PrerequisiteError: the program is not on PATH.
    """
    started = _start(args)
    with _ending_with_this(started):
        return started.wait()


def run_asking(args: Sequence[str]) -> int:
    """Run a program that may prompt the user; return its exit status like `run_attached`.

    Its output goes to stderr: stdout is for this process's data.

    Raises:
        PrerequisiteError: the program is not on PATH.
    """
    started = _start(args, stdout=sys.stderr.fileno())
    with _ending_with_this(started):
        return started.wait()


def run_passing(args: Sequence[str], stdin: bytes | None, on_output: Callable[[bytes], None]) -> int:
    """Run a program with `stdin`, and pass on its output immediately; return its exit status like `run_attached`.

    With None, its stdin is this process's. Its stderr is this process's stderr.

    Raises:
        PrerequisiteError: the program is not on PATH.
    """
    started = _start(args, stdin=None if stdin is None else subprocess.PIPE, stdout=subprocess.PIPE)
    with _ending_with_this(started):
        if started.stdout is None:
            raise AssertionError("stdout is a pipe")
        if started.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # its exit status is more helpful
                started.stdin.write(stdin or b"")
                started.stdin.flush()
            with contextlib.suppress(BrokenPipeError):
                started.stdin.close()
        while chunk := os.read(started.stdout.fileno(), 2**16):
            on_output(chunk)
    return started.returncode


@contextmanager
def _ending_with_this(started: subprocess.Popen[bytes]) -> Iterator[None]:
    """Wait for a program at the end of the block; terminate it if the block raises, as SIGTERM and SIGHUP do.

    Otherwise this process would wait for a program that does not know that it should end.
    """
    with started:
        try:
            yield
        except BaseException:
            started.terminate()
            raise


def start_detached(args: Sequence[str], *, log: Path, cwd: Path, environment: Mapping[str, str]) -> int:
    """Start a program that outlives this one and its terminal; return its process id.

    Its output is appended to `log`. It leads a new process group, to which signals can be sent.
    """
    with log.open("ab") as output:
        started = _start(
            args,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=cwd,
            env=dict(environment),
        )
    pid = started.pid
    started.returncode = 0  # no process waits for it; without this its destructor would warn
    return pid


def start_time(pid: int) -> str | None:
    """Return a value that distinguishes a process from a later one with the same id; None if it has ended.

    It is the start time in clock ticks, field 22 of /proc/PID/stat (proc(5)). A zombie has ended.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - hot path
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


def system_start() -> float:
    """Return when this machine, or the container around this process, was started: the start of its process 1."""
    with open("/proc/stat", encoding="utf-8") as file:  # noqa: PTH123 - as above
        booted = next(float(line.split()[1]) for line in file if line.startswith("btime "))
    return booted + int(start_time(1) or 0) / os.sysconf("SC_CLK_TCK")


def group_members(pid: int) -> list[int]:
    """Return the processes of the group that `pid` leads or led, without zombies."""
    members = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are all that is needed
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - hot path
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[2] == str(pid) and fields[0] != "Z":
            members.append(int(name))
    return members


def signal_group(pid: int, signal_number: int) -> None:
    """Send a signal to the process group that `pid` leads; do nothing if the group has ended."""
    try:
        os.killpg(pid, signal_number)
    except ProcessLookupError:
        return


_SLURM_CLIENT_VARIABLES: Final = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_CONF_SERVER"}
"""SLURM_* variables that configure Slurm's programs, rather than describe an enclosing job."""

IGNORED_SBATCH_VARIABLES: Final = frozenset(
    f"SBATCH_{name}"
    for name in (
        "ARRAY_INX", "ERROR", "INPUT", "NO_KILL", "NO_REQUEUE", "OPEN_MODE", "OUTPUT", "REQUEUE", "SIGNAL", "WAIT",
    )
)  # fmt: skip
"""Variables that contradict how ftkit submits and follows a job: one job, with its log in the run's folder, that is
told to stop and requeued."""


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for Slurm's programs.

    It lacks the variables of an enclosing job and those that change what the programs do or print; times are printed as
    epoch seconds.
    """
    kept = {
        key: value
        for key, value in environment.items()
        if (not key.startswith(("SLURM_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_")) or key in _SLURM_CLIENT_VARIABLES)
        and key not in IGNORED_SBATCH_VARIABLES
    }
    return kept | {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
