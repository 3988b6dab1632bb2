"""How a user's script ends, as `ftkit status` shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftkit.config.context import Context
from ftkit.launch.code import files_of
from ftkit.launch.resolve import RunArgs
from ftkit.launch.user_script import ScriptArgs, resolve_script
from ftkit.planning.plan import plan_to_json
from ftkit.runs.failure import read_rank_error


@pytest.mark.parametrize(
    ("script", "code", "kind"),
    [
        ("import sys; sys.exit(3)", 3, "SystemExit"),
        ("raise SystemExit('no data')", 1, "SystemExit"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("print('fine')", 0, None),
    ],
)
def test_the_end_of_a_script_is_recorded(
    script: str, code: int, kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    ctx = Context(tmp_path, tmp_path / "user", {"FTKIT_CLUSTER": "local"})
    plan, copies = resolve_script(ScriptArgs(Path("train.py")), RunArgs(gpus_per_node=1), [], ctx)
    layout = plan.layout
    for name, content in files_of(copies).items():
        (layout.root / name).parent.mkdir(parents=True, exist_ok=True)
        (layout.root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    layout.logs.mkdir()
    layout.plan.write_text(plan_to_json(plan))
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "FTKIT_STOP_FILE": "never"}
    words = [sys.executable, "-m", "ftkit.train.script_process", str(layout.plan), "0"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    error = read_rank_error(layout.rank_error(0))
    assert (done.returncode, error and error.type) == (code, kind), done.stderr
    assert error is None or not error.is_actionable
