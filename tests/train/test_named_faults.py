"""Twenty faults, injected into real processes: is the line that users read the right one, and how soon is it there?

FTKIT_FAULTS=FILE appends what each fault was named as, for `benchmarks/records/named-faults.json`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos.faults import kill
from waiting import PATIENCE_SECONDS, wait_until

from ftkit.planning.layout import RunLayout
from ftkit.runs.ends import find_end
from ftkit.runs.slow_ranks import describe_hang, read_hang_reports

PROGRAM = Path(__file__).with_name("faulty_rank.py")
HOST = socket.gethostname()
HANGS = {
    "stop": ("a rank is stopped", f"rank 1 on {HOST}: stopped (SIGSTOP), backward of step 8, since"),
    "dawdle": ("a call that never returns", "in dawdle, backward of step 8"),
    "wait_for_a_lock": ("a deadlock of threads", "in wait_for_a_lock, backward of step 8"),
    "hold_the_interpreter": ("native code that waits", "blocked in native code, which holds Python's lock"),
    "compute_natively": ("native code that computes", "computing in native code, which holds Python's lock"),
    "extra_collective": ("a rank calls another collective", "ranks execute different code: rank"),
    "data_worker": ("the data of a rank do not come", "in dawdle, loading the batch of step"),
    "slow_evaluation": ("a rank hangs between steps", "in dawdle, after step 8"),
}
KERNEL = {
    "oom": "Out of memory: Killed process 4711 (python)",
    "xid": "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus.",
    "ecc": "NVRM: Xid (PCI:0000:3b:00): 94, pid=4711, name=python, Contained: SM (0x1).",
    "link": "mlx5_core 0000:5e:00.0 mlx5_2: Port: 1 Link DOWN",
    "heat": "CPU12: Core temperature is above threshold, cpu clock is throttled (total events = 7)",
    "storage": "nfs: server store1 not responding, still trying",
    "host": "mce: [Hardware Error]: Machine check events logged",
}
CUDA = "CUDA error: unspecified launch failure"
DEATHS = {
    "a rank is killed": ("SIGKILL", "", "rank 1 was killed by SIGKILL"),
    "a crash of native code": ("SIGSEGV", "", "rank 1 was killed by SIGSEGV"),
    "a mapped file is cut short": ("truncated_file", "", "killed by SIGBUS: a memory-mapped file can't be read"),
    "a rank exits": ("exit", "", "rank 1 ended by exit code 3, and left no error"),
    "a Python error": ("wrong shape", "", f"rank 1 on {HOST}: RuntimeError: wrong shape"),
    "the disk is full": ("disk_full", "", "the disk is full, or its quota is exceeded"),
    "the kernel's OOM killer": ("SIGKILL", "oom", "the kernel's OOM killer ended process 4711"),
    "a GPU falls off the bus": (CUDA, "xid", "Xid 79 of GPU 0000:3b:00: the GPU has fallen off the bus"),
    "an ECC error": (CUDA, "ecc", "Xid 94 of GPU 0000:3b:00: uncorrectable ECC error"),
    "an ECC error, by NVML": (CUDA, "nvml", "GPU 0 ECC: 2 uncorrected errors"),
    "a link flaps": ("NCCL error: unhandled system error", "link", "link down: mlx5_2"),
    "a CPU is too hot": ("socket timeout", "heat", "a CPU is too hot"),
    "the file server is away": ("Stale file handle", "storage", "file server store1 does not respond"),
    "a hardware error of the host": ("SIGBUS", "host", "a hardware error of the host"),
}  # fmt: skip
DMESG = """#!/bin/sh
read -r up _ </proc/uptime
echo "[ 0.000001] Command line: $FTKIT_TEST_KERNEL"
echo "[ $up] $FTKIT_TEST_KERNEL"
"""
NVML = """
NVML_NVLINK_MAX_LINKS = 1
class NVMLError(Exception): pass
def nvmlInit(): pass
nvmlShutdown = nvmlInit
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetTotalEccErrors(*_): return 2
"""


def _record(fault: str, named: str, seconds: float) -> None:
    if file := os.environ.get("FTKIT_FAULTS"):
        with Path(file).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"fault": fault, "named": named, "seconds": round(seconds, 1)}) + "\n")


@pytest.mark.parametrize("fault", HANGS)
def test_a_hang_is_named(fault: str, make_run: Callable[..., Any]) -> None:
    name, expected = HANGS[fault]
    options = ("resources.hang_timeout_seconds=5", "training.checkpoint_every_steps=7", "evaluation.generation=null")
    run, began = make_run(f"hang-{fault}", *options), time.time()
    run.train(str(PROGRAM), fault, expect=1)
    error, reports = run.first_error(), read_hang_reports(run.layout)
    _record(name, error.message.partition(": ")[2], error.time - min(each.since for each in reports.values()))
    assert expected in error.message
    assert error.time - min(each.since for each in reports.values()) < 60
    assert len(reports) == 2
    assert describe_hang(reports, dict.fromkeys(reports, HOST)) in error.message
    assert error.message[:80] in str(find_end(run.layout, since=began)[0])


def test_a_checkpoint_that_is_not_written_is_named_but_does_not_end_the_run(make_run: Callable[..., Any]) -> None:
    options = ("resources.hang_timeout_seconds=5", "training.checkpoint_every_steps=7", "evaluation.generation=null")
    run = make_run("hang-checkpoint", *options)
    training = threading.Thread(target=run.train, args=[str(PROGRAM), "checkpoint_write"], kwargs={"expect": -9})
    training.start()
    wait_until(lambda: len(read_hang_reports(run.layout)) == 2)
    reports = read_hang_reports(run.layout)
    named, seconds = describe_hang(reports, dict.fromkeys(reports, HOST)), time.time() - reports[0].since
    wait_until(lambda: named in run.layout.rank_log(0).read_text(encoding="utf-8"))
    _record("a checkpoint is not written", named, seconds)
    kill(run.ranks.pids())
    training.join()
    assert f"rank 1 on {HOST}: at faulty_rank.py:28 in dawdle, after step 14" in named
    assert "[checkpoint]" in named


@pytest.mark.parametrize("name", DEATHS)
def test_a_death_is_named(name: str, tmp_path: Path) -> None:
    fault, cause, expected = DEATHS[name]
    layout, stand_ins, began = RunLayout(tmp_path / "run"), tmp_path / "stand-ins", time.time()
    stand_ins.mkdir()
    layout.logs.mkdir(parents=True)
    (stand_ins / "dmesg").write_text(DMESG)
    (stand_ins / "dmesg").chmod(0o755)
    if cause == "nvml":
        (stand_ins / "pynvml.py").write_text(NVML)
    words = ["--standalone", "--nproc-per-node=2", "--max-restarts=0", "-m", "faulty_rank", str(layout.plan)]
    environment = os.environ | {
        "PATH": f"{stand_ins}:{os.environ['PATH']}",
        "PYTHONPATH": f"{stand_ins}:{PROGRAM.parent}",
        "FTKIT_TEST_FAULT": fault,
        "FTKIT_TEST_KERNEL": KERNEL.get(cause, "nothing to tell"),
        "CUDA_VISIBLE_DEVICES": "0",
    }
    command = [sys.executable, "-m", "ftkit.train.launcher", "--heed-signals", *words]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 1, done.stderr
    end, _ = find_end(layout, since=began)
    _record(name, str(end), time.time() - began)
    assert expected in str(end), done.stderr
    assert ("(kernel: " in str(end)) == (cause in KERNEL)
