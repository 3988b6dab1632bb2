"""How long the command line makes a user wait: medians of whole processes.

Usage: python benchmarks/cli.py [--repeats 10] [--runs 1000]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEP = {
    "event": "step",
    "time": 1.0,
    "num_steps": 400,
    "epoch": 0.5,
    "learning_rate": 1e-3,
    "grad_norm": 1.0,
    "tokens_per_second": 12345.6,
    "step_seconds": 0.5,
    "overhead_ratio": 0.1,
    "data_wait_ratio": 0.0,
    "mfu": None,
    "memory_gib": None,
}


def ftkit(words: list[str], workspace: Path) -> str:
    """Call the program as a user does, and return its stdout."""
    environment = {**os.environ, "FTKIT_WORKSPACE": str(workspace), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "ftkit", *words], check=True, capture_output=True, text=True, env=environment
    )
    return done.stdout


def make_runs(workspace: Path, number: int) -> None:
    """Fill a workspace with runs that ended: nine of ten completed on Slurm, the others failed."""
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


def median_seconds(words: list[str], workspace: Path, repeats: int) -> float:
    """Time a command several times, after once to warm the caches of the file system."""
    ftkit(words, workspace)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        ftkit(words, workspace)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    """Print a table of medians beside what they are meant to be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--runs", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        make_runs(workspace, options.runs)
        cases = ((["--help"], 0.20), (["run", "demo", "--dry-run"], 0.50), (["runs"], 1.00))
        print(f"medians of {options.repeats} processes; {options.runs} runs in the workspace\n")
        print(f"{'command':<28}{'seconds':>9}{'at most':>9}")
        for words, limit in cases:
            print(f"ftkit {' '.join(words):<22}{median_seconds(words, workspace, options.repeats):>9.3f}{limit:>9.2f}")


if __name__ == "__main__":
    main()
