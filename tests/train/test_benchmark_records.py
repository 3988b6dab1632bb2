"""Records of benchmarks: each trainer's is written when it ends, and holds what is needed to plan its run again."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from recording import MEASURED, read_record
from waiting import PATIENCE_SECONDS

CHECKOUT = Path(__file__).parents[2]


def test_a_case_that_cannot_be_planned_ends_neither_the_others_nor_their_records(tmp_path: Path) -> None:
    cases = ("--case", "nothing-of-this-name", "--case", "tiny training.seed=3")
    done = subprocess.run(
        [sys.executable, CHECKOUT / "benchmarks" / "train.py", "--device", "cpu", *cases, "--steps", "5",
         "--warm-up-steps", "2", "--record", tmp_path],
        capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "there is no architecture 'nothing-of-this-name'" in done.stdout
    (path,) = tmp_path.iterdir()
    record = read_record(path)
    (row,) = record.rows
    assert (record.program, record.source) == ("benchmarks/train.py", MEASURED)
    assert row.labels["trainer"] == "ftkit"
    assert row.training
    assert "training.seed=3" in row.training.overrides
    assert row.repeats
    assert len(row.repeats["step_seconds"]) == 3
    seconds = statistics.median(row.repeats["step_seconds"])
    assert row.medians["step_seconds"] == pytest.approx(seconds)
    assert row.medians["tokens_per_second"] == pytest.approx(256 / seconds)
