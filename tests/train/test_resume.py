"""`ftkit resume` on other numbers of processes, through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.cli.main import main
from ftkit.planning.layout import Workspace
from ftkit.runs.find import list_runs
from ftkit.runs.metrics_file import read_records
from ftkit.runs.records import StartRecord, StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.planning.layout import RunLayout

TINY = Path(__file__).with_name("tiny.yaml")
WORDS = (
    "training.schedule=constant",
    "training.warmup_ratio=0",
    "training.micro_batch_size=auto",
    "evaluation.generation=null",
)


def losses(layout: RunLayout) -> dict[int, float]:
    return {record.step: record.loss for record in read_records(layout.metrics) if isinstance(record, StepRecord)}


def test_a_run_resumes_on_two_processes_and_on_one_again_with_the_same_losses(
    make_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTKIT_WORKSPACE", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    run = ("run", str(TINY), "--cluster", "local", "--processes-per-node", "1", *WORDS)
    assert main([*run, "--name", "moved", "training.max_steps=3"]) == 0
    assert main(["resume", "moved"]) == 6  # nothing is left to do
    assert main(["resume", "moved", "--processes-per-node", "2", "training.max_steps=6"]) == 0
    assert main(["resume", "moved", "--processes-per-node", "1", "training.max_steps=9"]) == 0
    moved = list_runs(Workspace(tmp_path))[0].layout
    straight = make_run("straight", *WORDS, "training.max_steps=9", processes=1)
    straight.train()
    starts = [record for record in read_records(moved.metrics) if isinstance(record, StartRecord)]
    assert [(start.world_size, start.resumed_from) for start in starts] == [(1, 0), (2, 3), (1, 6)]
    assert losses(moved) == pytest.approx(losses(straight.layout), abs=1e-5)
    assert sorted(losses(moved)) == list(range(1, 10))
    manifest = json.loads(moved.manifest.read_text())
    assert [each["processes_per_node"] for each in manifest["submissions"]] == [1, 2, 1]
    assert [each["from_step"] for each in manifest["submissions"]] == [0, 3, 6]
    assert manifest["submissions"][1]["changes"]["training.max_steps"] == {"before": 3, "after": 6}
    assert len(manifest["starts"]) == 3
