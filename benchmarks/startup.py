"""Benchmark start-up of the command line: medians of whole processes, relative to the required imports.

Usage: python benchmarks/startup.py [--repeats 10] [--runs 1000]
The exit status is 1 if a command exceeds its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from recording import add_record_option, record_repeats

STEP = {
    "event": "step",
    "time": 1.0,
    "num_steps": 400,
    "epoch": 0.5,
    "learning_rate": 1e-3,
    "grad_norm": 1.0,
    "targets": 4096,
    "tokens_per_second": 12345.6,
    "step_seconds": 0.5,
    "overhead_ratio": 0.1,
    "data_wait_ratio": 0.0,
    "mfu": None,
    "memory_gib": None,
}


@dataclass(frozen=True)
class Case:
    """A command in the table; `limit` is relative to the baseline."""

    title: str
    arguments: tuple[str, ...]
    limit: float | None = None
    variables: dict[str, str] = field(default_factory=dict)


def _completion(line: str) -> Case:
    """Return the command that the shell runs for completion at the end of a line."""
    variables = {"_FTKIT_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    return Case(f"{line}<TAB>", ("-m", "ftkit"), 3, variables)


DRY_RUN = "run --image olmo3:25.02 --nodes 2 --cluster a4-highgpu-8g --dry-run"
INSTALLED = {"PYTHONDONTWRITEBYTECODE": "", "CUDA_VISIBLE_DEVICES": ""}
"""An installed program has its bytecode compiled."""
CASES = [
    Case("python -c 'import click, rich.console'", ("-c", "import click, rich.console")),
    Case("ftkit --help", ("-m", "ftkit", "--help"), 1.2),
    Case(f"ftkit {DRY_RUN}", ("-m", "ftkit", *DRY_RUN.split()), 5),
    _completion("ftkit run --cluster a4"),
    _completion("ftkit status demo"),
    Case("ftkit runs", ("-m", "ftkit", "runs")),
]


def ftkit(words: list[str], workspace: Path) -> str:
    """Call the program in a subprocess, and return its stdout."""
    environment = {**os.environ, "FTKIT_WORKSPACE": str(workspace), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "ftkit", *words], check=True, capture_output=True, text=True, env=environment
    )
    return done.stdout


def make_runs(workspace: Path, number: int) -> None:
    """Fill a workspace with ended runs: nine of ten completed on Slurm, the others failed."""
    plan = json.loads(ftkit(["plan", "demo", "--json"], workspace))
    for index in range(number):
        folder = (
            workspace / "runs" / f"demo-20260101T{index // 3600:02}{index // 60 % 60:02}{index % 60:02}Z-{index:04x}"
        )
        (folder / "logs").mkdir(parents=True)
        state = "failed" if index % 10 == 0 else "completed"
        note = {"job_id": str(index), "state": state, "is_final": True, "observed": time.time() + 60}
        submission = {"scheduler": "slurm", "job_id": str(index), "submitted": 0.0, "host": "login"}
        steps = ({**STEP, "step": step, "loss": 6.0 - step / 100, "tokens": step * 8192} for step in range(10, 410, 10))
        (folder / "plan.json").write_text(json.dumps({**plan, "id": folder.name}, indent=2))
        (folder / "submission.json").write_text(json.dumps(submission))
        (folder / "state.json").write_text(json.dumps(note))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


def cpu_seconds() -> float:
    """Return the CPU time of all children that ended: unlike the time that passes, load hardly changes it."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(cases: list[Case], workspace: Path, repeats: int) -> list[list[float]]:
    """Return the CPU seconds per case. Cases are measured alternately, so that load affects all of them equally."""
    seconds: list[list[float]] = [[] for _ in cases]
    for repeat in range(-1, repeats):  # the first round only warms up the caches of the file system and of Python
        for case, measured in zip(cases, seconds, strict=True):
            environment = {**os.environ, **INSTALLED, "FTKIT_WORKSPACE": str(workspace), **case.variables}
            environment["PYTHONPYCACHEPREFIX"] = str(workspace / "bytecode")
            begin = cpu_seconds()
            subprocess.run([sys.executable, *case.arguments], check=True, capture_output=True, env=environment)
            if repeat >= 0:
                measured.append(cpu_seconds() - begin)
    return seconds


def main() -> int:
    """Print a Markdown table: medians, and the median ratio to the baseline of the same round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--runs", type=int, default=1000)
    add_record_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        make_runs(workspace, options.runs)
        seconds = measure(CASES, workspace, options.repeats)
    print(f"medians of {options.repeats} processes; {options.runs} runs in the workspace\n")
    print("| command | CPU seconds | times the baseline | at most |\n|---|---|---|---|")
    is_slow, found = False, {}
    for case, measured in zip(CASES, seconds, strict=True):
        ratios = [one / base for one, base in zip(measured, seconds[0], strict=True)]
        ratio = statistics.median(ratios)
        found[case.title] = {"CPU seconds": measured, "times the baseline": ratios}
        print(f"| `{case.title}` | {statistics.median(measured):.2f} | {ratio:.1f} | {case.limit or ''} |")
        is_slow |= case.limit is not None and ratio > case.limit
    record_repeats(options.record, "startup", found)
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
