"""Benchmark commands on large workspaces: a thousand runs, a run of ten million steps, a run on 1,024 ranks.

    python benchmarks/workspaces.py [--runs 1000] [--steps 10000000] [--ranks 1024] [--rounds 3] [--folder DIR]

It makes a workspace of copies of one planned run: one in ten is pending or runs, one in ten has failed, and the others
are completed, as their last command left them. Columns: seconds of CPU of a command (user and system, children
included), and its peak memory in MiB. The files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from recording import add_record_option, record_repeats

from ftkit.planning.layout import RunLayout, Workspace
from ftkit.runs.gpu_samples import GpuSample, NodeSample
from ftkit.runs.gpu_samples import to_line as sample_to_line
from ftkit.runs.metrics_file import append_record
from ftkit.runs.records import (
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    Record,
    StageRecord,
    StartRecord,
    StepRecord,
    to_line,
)
from ftkit.runs.slow_ranks import RankTiming

NOW = time.time()
STAMP = "20260101T{:02d}{:02d}{:02d}Z"
STEP = StepRecord(NOW, 1, 100, 0.1, 2.0, 1e-5, 1.0, 4096, 2048, 1e4, 0.5, 0.01, 0.001, 0.4, 40.0)
COLUMNS = "{:<44} {:>8} {:>8}"


def plan_of(workspace: Path) -> dict[str, Any]:
    """Return the plan of a run in the workspace."""
    command = [sys.executable, "-m", "ftkit", "plan", "demo", "--cluster", "local", "--json"]
    done = subprocess.run(command, env=environment(workspace), capture_output=True, text=True, check=True)
    plan: dict[str, Any] = json.loads(done.stdout)
    plan["cluster"]["scheduler"] = "slurm"
    return plan


def environment(workspace: Path) -> dict[str, str]:
    """Return the variables of the commands: with a squeue that knows no job, and no other settings."""
    return os.environ | {"FTKIT_WORKSPACE": str(workspace), "PATH": f"{workspace}/bin:{os.environ['PATH']}"}


def make_run(workspace: Workspace, plan: dict[str, Any], number: int, name: str) -> RunLayout:
    """Make the folder of a submitted run."""
    seconds = number % 86400
    run = f"{name}-{STAMP.format(seconds // 3600, seconds // 60 % 60, seconds % 60)}-{number:04x}"
    layout = RunLayout(workspace.runs / run)
    layout.logs.mkdir(parents=True)
    layout.plan.write_text(json.dumps(plan | {"id": run, "name": name, "workspace": str(workspace.root)}, indent=2))
    submission = {"scheduler": "slurm", "job_id": str(1000 + number), "submitted": NOW - 9000, "host": "login"}
    layout.submission.write_text(json.dumps(submission))
    starts = [{"time": NOW - 8900, "job_id": str(1000 + number), "host": "n1"}]
    layout.manifest.write_text(json.dumps({"run": run, "starts": starts}))
    layout.job_log.write_text("ftkit: training\n" * 200)
    return layout


def start_of(world_size: int) -> list[Record]:
    """Return the first records of a run."""
    begin = NOW - 8800
    start = StartRecord(begin, 100, 0, world_size, "fsdp2", "cuda", 10**9, {"torch": "2.11"})
    return [StageRecord(begin, "loading weights"), start]


def make_runs(workspace: Workspace, plan: dict[str, Any], number: int) -> None:
    """Make runs of 100 steps in all states."""
    for each in range(number):
        layout = make_run(workspace, plan, each, f"run{each % 50}")
        state = {9: "open", 8: "failed"}.get(each % 10, "completed")
        records = start_of(8) + [replace(STEP, time=NOW - 8700 + step, step=step) for step in range(1, 101)]
        end = [EndRecord(NOW - 8000, "completed", 100, 600.0, None)] if state == "completed" else []
        layout.metrics.write_text("".join(to_line(record) + "\n" for record in (*records, *end)))
        if state != "open":
            layout.job_exit_code(1000 + each).write_text("0\n" if state == "completed" else "1\n")


def make_long_run(workspace: Workspace, plan: dict[str, Any], num_steps: int, name: str, number: int) -> RunLayout:
    """Make a run that records each step, with an evaluation and a checkpoint every 10,000 steps."""
    layout = make_run(workspace, plan, number, name)
    for record in start_of(8):
        append_record(layout.metrics, record)
    values = {"event": "step", **asdict(replace(STEP, num_steps=num_steps))}
    line = json.dumps({key: value for key, value in values.items() if value is not None and value != {}})
    before, after = line.split(f'"time": {STEP.time}, "step": 1')
    middle, tail = after.split('"tokens": 4096')
    begin, interval = NOW - 8000, 8000 / num_steps
    for first in range(1, num_steps + 1, 10_000):
        last = min(first + 10_000, num_steps + 1)
        with layout.metrics.open("a") as file:
            file.writelines(
                f'{before}"time": {begin + step * interval:.3f}, "step": {step}{middle}"tokens": {4096 * step}{tail}\n'
                for step in range(first, last)
            )
        at = begin + last * interval
        append_record(layout.metrics, EvaluationRecord(at, last - 1, "during", 2.0, 7.4, ()))
        append_record(layout.metrics, CheckpointRecord(at, last - 1, str(layout.checkpoint(last - 1)), 1.0, 0.1))
    append_record(layout.metrics, EndRecord(NOW, "completed", num_steps, 8000.0, None))
    layout.job_exit_code(1000 + number).write_text("0\n")
    return layout


def make_wide_run(workspace: Workspace, plan: dict[str, Any], num_ranks: int) -> RunLayout:
    """Make a run on nodes of 8 ranks: for each rank a log and its timing, for each node an hour of GPU samples."""
    layout = make_run(workspace, plan, 30_002, "wide")
    layout.gpu_samples.mkdir()
    for record in [*start_of(num_ranks), *(replace(STEP, step=step) for step in range(1, 101))]:
        append_record(layout.metrics, record)
    for rank in range(num_ranks):
        timing = RankTiming(rank, f"n{rank // 8:04}", "cuda", 100, 100, 0.5, 0.01)
        layout.rank_timing(rank).write_text(json.dumps(asdict(timing)))
        layout.rank_log(rank).write_text("a line of a rank\n" * 100)
    gpus = tuple(GpuSample(index, 90.0, 80.0, 60.0, 600.0, 60.0, 1900.0, 1e9) for index in range(8))
    for node in range(num_ranks // 8):
        samples = (NodeSample(NOW - 3600 + 10 * each, f"n{node:04}", 1e12, gpus) for each in range(360))
        (layout.gpu_samples / f"n{node:04}.jsonl").write_text("".join(map(sample_to_line, samples)))
    return layout


def measure(workspace: Path, words: list[str], rounds: int) -> dict[str, list[float]]:
    """Return CPU seconds and the peak memory in MiB of each repeat of a command."""
    found: dict[str, list[float]] = {"CPU s": [], "MiB": []}
    code = (
        "import json, resource, subprocess, sys\n"
        "done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))\n"
        "sys.exit(done.stderr.decode() if done.returncode else 0)\n"
    )
    command = [sys.executable, "-c", code, sys.executable, "-m", "ftkit", *words]
    for _ in range(rounds):
        done = subprocess.run(command, env=environment(workspace), capture_output=True, text=True, check=True)
        for name, value in zip(found, json.loads(done.stdout), strict=True):
            found[name].append(round(value, 3))
    return found


def main() -> None:
    """Make the workspace, and measure the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="make the workspace there once, and keep it")
    add_record_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ftkit-workspaces-") as temporary:
        root = options.folder or Path(temporary)
        workspace = Workspace(root)
        squeue = root / "bin" / "squeue"
        if not workspace.runs.exists():
            squeue.parent.mkdir(parents=True)
            for program in (squeue, squeue.with_name("sacct")):
                program.write_text("#!/bin/sh\n")
                program.chmod(0o755)
            plan = plan_of(root)
            make_runs(workspace, plan, options.runs)
            for name, number in (("long", 30_000), ("other", 30_001)):
                make_long_run(workspace, plan, options.steps, name, number)
            make_wide_run(workspace, plan, options.ranks)
        commands = {
            f"ftkit runs, of {options.runs:,}": ["runs"],
            "ftkit status": ["status", "run7"],
            "ftkit runs top": ["runs", "top", "run7", "--once"],
            "ftkit rm --unused --dry-run": ["rm", "--unused", "--dry-run"],
            f"ftkit status, {options.steps:,} steps": ["status", "long"],
            f"ftkit compare, two of {options.steps:,} steps": ["compare", "long", "other"],
            f"ftkit status, {options.ranks:,} ranks": ["status", "wide"],
            f"ftkit runs top, {options.ranks:,} ranks": ["runs", "top", "wide", "--once"],
        }
        print(COLUMNS.format("command", "CPU s", "MiB"))
        measured = {}
        for name, words in commands.items():
            measured[name] = measure(root, words, options.rounds)
            print(COLUMNS.format(name, *(f"{sorted(each)[len(each) // 2]:.2f}" for each in measured[name].values())),
                  flush=True)  # fmt: skip
        record_repeats(options.record, "workspaces", measured)


if __name__ == "__main__":
    main()
