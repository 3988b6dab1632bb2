"""Run folders, which are shared, partially copied and edited manually."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftkit.config.context import Context
from ftkit.config.load import load_cluster, load_recipe
from ftkit.config.request import RunRequest
from ftkit.planning.plan import plan_to_json
from ftkit.planning.planner import plan_run
from ftkit.runs.failure import RankError
from ftkit.runs.job import Submission
from ftkit.runs.records import EndRecord, EvaluationRecord, Sample, StageRecord, StartRecord, StepRecord, to_line
from fuzzing.area import Area, Case, write_case
from fuzzing.command_line import command_line
from fuzzing.mutate import damaged_json

if TYPE_CHECKING:
    import random

_NOWHERE = Context(Path("/nowhere/project"), Path("/nowhere/user"), {})
_IDS = {"good": "good-20260102T030405Z-0001", "odd": "odd-20260102T030406Z-0002"}
_WORKSPACE = b"/a/workspace"
_LOGS = ("error-00000.json",)


@cache
def _whole(name: str) -> Case:
    """Return a run with every kind of file."""
    cluster = load_cluster("local", _NOWHERE).model_copy(
        update={"scheduler": "slurm", "device": "cpu", "cpus_per_node": 2}
    )
    recipe = load_recipe("demo", _NOWHERE, ("training.max_steps=400",))
    created = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    request = RunRequest(None, None, None, None, False, Path(_WORKSPACE.decode()), "/venv/bin/python", created, "ab12")
    plan = replace(plan_run(recipe, cluster, None, request), id=_IDS[name], name=name)
    samples = (Sample("q", "a", "a", True), Sample("q", "a", "b", False))
    step = StepRecord(10.0, 7, 400, 0.5, 1.5, 1e-3, 1.0, 8192, 4096, 12345.6, 0.5, 0.1, 0.0, None, None)
    records = (
        StageRecord(0.0, "s"),
        StartRecord(1.0, 400, 0, 2, "fsdp2", "cpu", 951680, {"torch": "2"}),
        EvaluationRecord(2.0, 0, "before", 6.0, 812.5, samples, scores={"sql": 0.0}),
        step,
        EvaluationRecord(3.0, 400, "after", 6.0, 812.5, samples, scores={"sql": 0.0}),
        EndRecord(1e9, "completed", 400, 75.0, "/w/export"),
    )
    values: dict[str, Any] = {
        "submission.json": asdict(Submission("slurm", "4711", 1.0, "login")),
        "state.json": {
            "observed": 4e9, "job": {"id": "4711", "state": "failed", "is_final": True, "exit_code": 1}
        },
        "manifest.json": {"run": plan.id, "command": ["ftkit", "run", "demo"], "started": {"image": None}},
        "error-00000.json": asdict(RankError(2e9, 1, "n", "ValueError", "no", "Traceback", 9)),
    }  # fmt: skip
    return {name: json.dumps(content).encode() for name, content in values.items()} | {
        "plan.json": plan_to_json(plan).encode(),
        "metrics.jsonl": b"".join(to_line(record).encode() + b"\n" for record in records),
        "exit-code": b"1",
        "job.sbatch": b"true\n",
    }


def _make(rng: random.Random) -> Case:
    whole = _whole("odd")
    names = rng.sample(sorted(whole), rng.choice((1, 1, 2)))
    return {name: damaged_json(rng, whole[name]) for name in names}


def _run(case: Case, folder: Path) -> bool:
    runs = folder / "workspace" / "runs"
    for name, files in (("good", _whole("good")), ("odd", _whole("odd") | case)):
        root = runs / _IDS[name]
        plan = files["plan.json"].replace(_WORKSPACE, str(folder / "workspace").encode())
        write_case(root, {file: content for file, content in files.items() if file not in _LOGS} | {"plan.json": plan})
        write_case(root / "logs", {file: files[file] for file in _LOGS} | {"job.log": b"words\n"})
    odd = _IDS["odd"]
    with command_line(folder) as call:
        for words in (("runs",), ("status", odd), ("status", odd, "--json"), ("rm", "--unused", "--dry-run")):
            code, out = call(*words)
            assert code == 0, words
            assert "\x1b" not in out, "escape sequences of a file reach the terminal"
        listed = {run["name"]: run for run in json.loads(call("runs", "--json")[1])}
        assert call("logs", odd) == (0, "words\n")
        assert call("resume", odd, "--no-follow")[0] > 1, "Slurm is not available"
        assert call("cancel", odd)[0] != 1
    assert listed["good"]["step"] == 7
    return bool(listed["odd"]["state"] != "damaged")


RUNS = Area("runs", _make, _run)
