"""How a rank reacts to its launcher, tested with processes that do nothing else."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from waiting import wait_until

from ftkit import process
from ftkit.errors import MemoryExhaustedError
from ftkit.planning.layout import RunLayout
from ftkit.runs.failure import read_rank_error
from ftkit.train import launcher as launcher_module

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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


@pytest.mark.parametrize(
    ("before", "now", "meaning", "code"),
    [
        (1, 2, "by the kernel's OOM killer, for lack of host memory", MemoryExhaustedError.exit_code),
        (1, 1, "not by the kernel's OOM killer", 1),
        (None, None, "dmesg", 1),
    ],
)
def test_a_sigkill_is_the_kernels_only_if_it_counted_one(
    before: int | None, now: int | None, meaning: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_module, "_count_oom_kills", lambda: now)
    failure = SimpleNamespace(exitcode=-9, timestamp=7, signal_name=lambda: "SIGKILL")
    layout = RunLayout(tmp_path)
    launcher_module._record_deaths(layout, cast("Any", SimpleNamespace(failures={1: failure})), before)
    error = read_rank_error(layout.rank_error(1))
    assert error is not None
    assert (error.was_killed, error.exit_code, error.can_resume) == (True, code, code == 1)
    assert meaning in error.message


CRASH = """
import ctypes, os, sys
from types import SimpleNamespace
from ftkit.train.launcher import _place_core_dumps
print(_place_core_dumps(SimpleNamespace(resources=SimpleNamespace(core_dumps=sys.argv[1] == "True"))), flush=True)
ctypes.string_at(0)
"""


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_crashed_rank_dumps_its_core_on_request_and_on_the_nodes_disk(tmp_path: Path, *, is_wanted: bool) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    run.mkdir()
    crashed = subprocess.run(
        [sys.executable, "-c", CRASH, str(is_wanted)], cwd=run, env={**os.environ, "FTKIT_CACHE_DIR": str(disk)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert crashed.returncode == -signal.SIGSEGV
    assert list(run.iterdir()) == []
    place = crashed.stdout.strip()
    assert bool(place) == disk.exists() == is_wanted
    if place.startswith(str(disk)) and resource.getrlimit(resource.RLIMIT_CORE)[1]:
        assert list(disk.glob("core-dumps/*"))


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
