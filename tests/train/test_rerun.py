"""A run is repeated from its bundle in another workspace, through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.train

FTKIT = Path(sys.executable).with_name("ftkit")
RECIPE = """
name: sums
extends: demo
data:
  source: rows.jsonl
  format: {kind: prompt-completion, prompt: "{prompt}", completion: "{completion}"}
training: {max_steps: 4, log_every_steps: 1, checkpoint_every_steps: 4, sequence_length: 128, global_batch_size: 2}
evaluation: {generation: null}
"""


def ftkit(project: Path, workspace: str, *arguments: str, code: int = 0) -> str:
    environment = os.environ | {"FTKIT_WORKSPACE": str(project / workspace), "XDG_CONFIG_HOME": "/nonexistent"}
    environment["FTKIT_REPORT"] = "1" if workspace == "there" else "0"
    done = subprocess.run(
        [str(FTKIT), *arguments], cwd=project, env=environment, capture_output=True, text=True,
        timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_a_run_is_repeated_bit_for_bit_from_its_bundle_and_gets_a_report(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} plus {n % 7}", "completion": str(n + n % 7)} for n in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.yaml").write_text(RECIPE)
    ftkit(tmp_path, "here", "run", "sums.yaml", "--cluster", "local", "--processes-per-node", "1")
    ftkit(tmp_path, "here", "runs", "bundle", "sums", "-o", "sums.tar")
    told = ftkit(tmp_path, "there", "rerun", "sums.tar")
    assert "the losses of sums-" in told
    assert "(4 records)" in told
    (run,) = json.loads(ftkit(tmp_path, "there", "runs", "--json"))
    page = Path(run["folder"], "report.html").read_text()
    assert '<span class="pill completed">completed</span>' in page
    assert "losses of sums-" in page
