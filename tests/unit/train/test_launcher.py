"""How a rank reacts to its launcher, tested with processes that do nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from waiting import wait_until

from ftkit import process

if TYPE_CHECKING:
    from collections.abc import Iterator

RANK = """
import sys, time
from ftkit.train.launcher import follow_launcher
follow_launcher(lambda: print("released", flush=True))
print("ready", flush=True)
time.sleep(3600)
"""
LAUNCHER = f"""
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", {RANK!r}], start_new_session=True)
print(rank.pid, flush=True)
if sys.stdin.readline():
    rank.terminate()
    print(rank.wait(), flush=True)
"""


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        yield started
        started.kill()


def read(launcher: subprocess.Popen[str]) -> str:
    assert launcher.stdout is not None
    return launcher.stdout.readline().strip()


@pytest.fixture
def rank(launcher: subprocess.Popen[str]) -> int:
    pid = int(read(launcher))
    assert read(launcher) == "ready"
    return pid


def test_a_rank_ends_if_its_launcher_is_killed(launcher: subprocess.Popen[str], rank: int) -> None:
    launcher.kill()
    wait_until(lambda: process.start_time(rank) is None)


def test_a_rank_shuts_down_if_its_launcher_sends_sigterm(launcher: subprocess.Popen[str], rank: int) -> None:
    assert launcher.stdin is not None
    launcher.stdin.write("end it\n")
    launcher.stdin.flush()
    assert read(launcher) == "released"
    assert read(launcher) == "143"
    assert process.start_time(rank) is None


def test_a_rank_continues_when_another_process_sends_sigterm(launcher: subprocess.Popen[str], rank: int) -> None:
    os.kill(rank, signal.SIGTERM)
    wait_until(lambda: not _is_pending(rank))
    assert process.start_time(rank) is not None
    launcher.kill()
    wait_until(lambda: process.start_time(rank) is None)


def _is_pending(pid: int) -> bool:
    """Return whether SIGTERM is pending: ShdPnd is a hexadecimal mask, proc(5)."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:  # noqa: PTH123
        (mask,) = [line.split()[1] for line in file if line.startswith("ShdPnd")]
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)
