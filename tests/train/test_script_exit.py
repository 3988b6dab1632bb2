"""How a user's script ends, and its progress, as `ftkit status` shows them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waiting import wait_until

from ftkit.config.context import Context
from ftkit.launch.code import files_of
from ftkit.launch.resolve import RunArgs
from ftkit.launch.user_script import ScriptArgs, resolve_script
from ftkit.planning.plan import plan_to_json
from ftkit.runs.failure import read_rank_error
from ftkit.runs.script_log import read_script_step
from ftkit.runs.slow_ranks import describe_hang, read_hang_reports

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout


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
    done_code, layout = run_script(script, tmp_path, monkeypatch)
    error = read_rank_error(layout.rank_error(0))
    assert (done_code, error and error.type) == (code, kind), layout.job_log.read_text()
    assert error is None or not error.is_actionable


def test_the_progress_of_transformers_trainer_is_read_from_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, layout = run_script(TRAINER, tmp_path, monkeypatch)
    assert code == 0, layout.job_log.read_text()
    found = read_script_step(layout)
    assert found is not None
    assert (found.step, found.num_steps) == (12, 12)
    states = sorted(layout.root.glob("out/checkpoint-*/trainer_state.json"))
    last = [each for each in json.loads(states[-1].read_text())["log_history"] if "loss" in each][-1]
    assert (found.loss, found.learning_rate) == pytest.approx((last["loss"], last["learning_rate"]), rel=1e-3)


TRAINER = """
import os
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=50, n_positions=8))
rows = [{"input_ids": (ids := torch.randint(0, 50, (8,))), "labels": ids} for _ in range(40)]
args = TrainingArguments(
    output_dir=os.environ["FTKIT_RUN_DIR"] + "/out", max_steps=12, logging_steps=3, eval_strategy="steps", eval_steps=4,
    per_device_train_batch_size=2, report_to=[], use_cpu=True,
)
Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows).train()
"""


def test_a_script_that_hangs_is_reported_and_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = prepare_script(HANGS, tmp_path, monkeypatch, "resources.hang_timeout_seconds=2", num_processes=2)
    words = [sys.executable, "-m", "ftkit.train.launcher", "--heed-signals", "--standalone", "--nproc-per-node=2"]
    words += ["--max-restarts=0", "-m", "ftkit.train.script_process", str(layout.plan), "0"]
    with (
        layout.job_log.open("w") as log,
        subprocess.Popen(words, env=os.environ | {"FTKIT_STOP_FILE": "never"}, stdout=log, stderr=log) as launcher,
    ):
        wait_until(lambda: len(read_hang_reports(layout)) == 2 or launcher.poll() is not None, layout.job_log.read_text)
        reports = read_hang_reports(layout)
        assert launcher.poll() is None, layout.job_log.read_text()
        launcher.kill()
    host = socket.gethostname()
    told = describe_hang(reports, dict.fromkeys(reports, host))
    assert told.startswith(f"rank 1 on {host}: at train.py:11 in dawdle, after step 8, since")
    assert "; rank 0: in all_reduce" in told


HANGS = """
import sys
import time

assert "transformers" not in sys.modules

import torch
from torch import distributed

def dawdle():
    time.sleep(3600)

distributed.init_process_group("gloo")
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight])
for step in range(20):
    if step == 8 and distributed.get_rank() == 1:
        dawdle()
    weight.grad = torch.ones(1)
    distributed.all_reduce(weight.grad)
    optimizer.step()
"""


def prepare_script(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str, num_processes: int = 1
) -> RunLayout:
    """Write the files of a run of a script on this machine."""
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    ctx = Context(tmp_path, tmp_path / "user", {"FTKIT_CLUSTER": "local"})
    args = RunArgs(processes_per_node=num_processes, overrides=overrides)
    plan, copies = resolve_script(ScriptArgs(Path("train.py")), args, [], ctx)
    layout = plan.layout
    for name, content in files_of(copies).items():
        (layout.root / name).parent.mkdir(parents=True, exist_ok=True)
        (layout.root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    layout.logs.mkdir()
    layout.plan.write_text(plan_to_json(plan))
    return layout


def run_script(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, RunLayout]:
    """Run a script as rank 0 of a run on this machine; return its exit code and the run's files."""
    layout = prepare_script(script, tmp_path, monkeypatch)
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "FTKIT_STOP_FILE": "never"}
    words = [sys.executable, "-m", "ftkit.train.script_process", str(layout.plan), "0"]
    environment |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0", "PYTHONUNBUFFERED": "1"}
    with layout.job_log.open("w") as log:
        done = subprocess.run(words, env=environment, stdout=log, stderr=log, check=False)
    return done.returncode, layout
