"""A shortened demo: from the command to a model that answers questions about unseen tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_SECONDS

from ftkit.runs.metrics_file import read_records
from ftkit.runs.records import EvaluationRecord, StepRecord

pytestmark = pytest.mark.train

FTKIT = Path(sys.executable).with_name("ftkit")


def ftkit(workspace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"FTKIT_WORKSPACE": str(workspace), "XDG_CONFIG_HOME": "/nonexistent"}
    return subprocess.run(
        [str(FTKIT), *arguments],
        cwd=workspace,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )


def test_the_demo_model_answers_questions_about_unseen_tables(tmp_path: Path) -> None:
    done = ftkit(
        tmp_path, "run", "demo", "--cluster", "local", "training.max_steps=700", "data.source.num_train=4000",
        "evaluation.generation.num_rows=100",
    )  # fmt: skip
    (run,) = json.loads(ftkit(tmp_path, "runs", "--json").stdout)
    assert (run["state"], run["step"]) == ("completed", 700)
    records = [*read_records(Path(run["folder"]) / "metrics.jsonl")]
    before, after = (record for record in records if isinstance(record, EvaluationRecord))
    assert before.execution_accuracy == 0.0
    assert after.execution_accuracy is not None
    assert after.execution_accuracy >= 0.2
    assert after.perplexity < before.perplexity / 100
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert steps[-1].loss < steps[0].loss / 10
    # Without a terminal: plain lines on stderr, and only the run id on stdout.
    assert "step 700/700" in done.stderr
    assert "execution accuracy 0% →" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
