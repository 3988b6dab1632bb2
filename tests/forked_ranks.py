"""Ranks that start without importing torch: forked from a process that has imported their modules.

The process reads one job per line from standard input, runs it, and writes torchrun's exit code: that of the first
failed rank, upon which the others are terminated.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

SLOW_RANK = "FTKIT_TEST_SLOW_RANK"
"""Variable with the rank that computes slowly."""
_ANSWERS = 1
_IMPORTED = ("ftkit.train.trainer", "peft")
_GRACE_SECONDS = 5
"""Seconds after which a rank that does not end is killed, as by torchrun after 30."""


@dataclass(frozen=True)
class Job:
    """Processes that train: `python -m ftkit.train PLAN` in each, or `python PROGRAM ARGUMENT... PLAN`."""

    program: tuple[str, ...]
    plan: str
    num_ranks: int
    port: int
    output: str
    environment: dict[str, str]


class ForkedRanks:
    """Runs jobs one after another."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._server:
            self._server.kill()

    def run(self, plan: Path, num_ranks: int, output: Path, *program: str, timeout: float) -> int:
        """Run a job; return its exit code. The output of the ranks goes to `output`."""
        output.unlink(missing_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        job = Job(program, str(plan), num_ranks, port, str(output), {**os.environ, "OMP_NUM_THREADS": "1"})
        questions, answers = self._server.stdin, self._server.stdout
        assert questions is not None
        assert answers is not None
        questions.write(json.dumps(asdict(job)) + "\n")
        questions.flush()
        assert select.select([answers], [], [], timeout)[0], output.read_text()
        return int(answers.readline())

    def pids(self) -> list[int]:
        """Return the process ids of the ranks that run now; of all of them, in the order of their ranks."""
        server = self._server.pid
        children = Path(f"/proc/{server}/task/{server}/children").read_text(encoding="ascii")
        return sorted(map(int, children.split()))


def serve() -> None:
    """Run the jobs listed on standard input."""
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # forked ranks need not search for garbage in what was imported
    for line in sys.stdin:
        code = _run(Job(**json.loads(line)))
        os.write(_ANSWERS, f"{code}\n".encode())


def _run(job: Job) -> int:
    running = {_start(job, rank) for rank in range(job.num_ranks)}
    first, deadline = 0, float("inf")
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            running.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            if code and not first:
                first, deadline = code, time.monotonic() + _GRACE_SECONDS
                _signal(running, signal.SIGTERM)
            continue
        if time.monotonic() > deadline:
            _signal(running, signal.SIGKILL)
        time.sleep(0.01)
    return first


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def _slow_down() -> None:
    """Make matmuls as slow as those of a faulty device."""
    functional = importlib.import_module("torch.nn.functional")
    linear = functional.linear

    def slow_linear(*arguments: Any) -> Any:
        time.sleep(0.002)
        return linear(*arguments)

    functional.linear = slow_linear


def _start(job: Job, rank: int) -> int:
    if pid := os.fork():
        return pid
    try:
        if job.environment.get(SLOW_RANK) == str(rank):
            _slow_down()
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(job.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable()  # a crash of native code ends without any other word
        os.environ.clear()
        os.environ |= job.environment | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job.num_ranks),
            "LOCAL_WORLD_SIZE": str(job.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(job.port),
        }
        sys.argv[1:] = [*job.program[1:], job.plan]
        if job.program:
            runpy.run_path(job.program[0], run_name="__main__")
        else:
            runpy.run_module("ftkit.train", run_name="__main__", alter_sys=True)  # ends this process
    except BaseException:  # noqa: BLE001 - nothing may return to the caller's loop
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    serve()
