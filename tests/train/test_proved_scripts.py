"""`ftkit run --script --prove`: the verdict on scripts in processes of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ftkit.config.context import Context
from ftkit.files import parse_json
from ftkit.launch.code import files_of
from ftkit.launch.resolve import RunArgs
from ftkit.launch.user_script import ScriptArgs, resolve_script
from ftkit.planning.plan import plan_to_json
from ftkit.runs.script_checks import Verdict

LOOP = """
import os, sys
import torch
from torch import nn, distributed
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

kind, sampling = sys.argv[1:]
distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 50))
if kind == "ddp":
    model = DistributedDataParallel(model)
elif kind == "fsdp":
    for layer in model:
        if not isinstance(layer, nn.GELU):
            fully_shard(layer)
    fully_shard(model)
data = TensorDataset(torch.randint(50, (64, 17)))
sampler = DistributedSampler(data) if sampling == "divided" else None
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, (ids,) in enumerate(DataLoader(data, batch_size=4, sampler=sampler)):
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if distributed.get_rank() == 0:
        print("loss", loss.item())
"""


LOSS_INSIDE = """
import sys
import torch
from torch import nn, distributed
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 50))
        self.unused = nn.Linear(16, 16)

    def forward(self, input_ids, labels):
        logits = self.layers(input_ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


distributed.init_process_group("gloo")
torch.manual_seed(distributed.get_rank())
model = DistributedDataParallel(Model(), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    ids = torch.randint(50, (4, 17))
    shift = int(sys.argv[1])
    model(input_ids=ids[:, : 17 - shift], labels=ids[:, shift:])["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("kind", "sampling", "expected"),
    [
        ("ddp", "divided", set()),
        ("fsdp", "divided", set()),
        ("ddp", "same", {"samples of ranks"}),
        ("fsdp", "same", {"samples of ranks"}),
        ("alone", "divided", {"replicas"}),
    ],
)
def test_two_ranks_are_judged_together(
    kind: str, sampling: str, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict, log = prove(LOOP, (kind, sampling), tmp_path, monkeypatch, num_ranks=2)
    assert {finding.check for finding in verdict.findings} == expected, log
    assert {"gradients", "optimizer", "shift"} <= set(verdict.passed)
    assert verdict.seconds < 10
    assert ("replicas" in verdict.not_checked) == (kind == "fsdp")


@pytest.mark.parametrize(("shift", "expected"), [(1, set()), (0, {"shift"})])
def test_logits_that_ddp_copies_for_unused_parameters_are_watched(
    shift: int, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict, log = prove(LOSS_INSIDE, (str(shift),), tmp_path, monkeypatch, num_ranks=2)
    assert {finding.check for finding in verdict.findings} - {"gradients"} == expected, log
    assert {"optimizer", "zero_grad"} <= set(verdict.passed), log


def test_training_is_the_same_as_without_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = []
    for number, is_proved in enumerate((True, False)):
        folder = tmp_path / str(number)
        folder.mkdir()
        logs.append(run(DROPOUT, (), folder, monkeypatch, 1, is_proved=is_proved)[1])
    losses = [[line for line in log.splitlines() if line.startswith("loss")] for log in logs]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
    assert "hooks False" in logs[0].splitlines()
    assert "ftkit: prove: 1 finding" in logs[0]
    assert "ftkit: prove: modes: The model trains in evaluation mode" in logs[0]
    assert "ftkit: prove: not checked: accumulation: a step has one micro-batch" in logs[0]


DROPOUT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(6):
    model.train(step != 1)
    loss = model(torch.randn(16, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item(), float(model[1].running_mean.sum()))
print("hooks", bool(torch.nn.modules.module._has_any_global_hook()))
"""


def prove(
    script: str, args: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> tuple[Verdict, str]:
    path, log = run(script, args, folder, monkeypatch, num_ranks, is_proved=True)
    assert path.exists(), log
    return parse_json(path.read_bytes(), Verdict), log


def run(
    script: str,
    args: tuple[str, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
    *,
    is_proved: bool,
) -> tuple[Path, str]:
    """Run the ranks of a script; return the path of the verdict, and their output."""
    (folder / "train.py").write_text(script)
    monkeypatch.chdir(folder)
    ctx = Context(folder, folder / "user", {"FTKIT_CLUSTER": "local"})
    about = ScriptArgs(Path("train.py"), args, is_proved=is_proved)
    plan, copies = resolve_script(about, RunArgs(processes_per_node=num_ranks), [], ctx)
    layout = plan.layout
    for name, content in files_of(copies).items():
        (layout.root / name).parent.mkdir(parents=True, exist_ok=True)
        (layout.root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    layout.logs.mkdir()
    layout.plan.write_text(plan_to_json(plan))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = [sys.executable, "-m", "ftkit.train.script_process", str(layout.plan), "0"]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    common = address | {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    with layout.job_log.open("w") as log:
        processes = [
            subprocess.Popen(
                words, stdout=log, stderr=log,
                env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "FTKIT_STOP_FILE": "never"},
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        codes = [process.wait() for process in processes]
    output = layout.job_log.read_text()
    assert codes == [0] * num_ranks, output
    return layout.proof, output
