"""Runs in a temporary workspace, and fake Slurm programs."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ftkit import assets
from ftkit.config.context import Context
from ftkit.config.load import load_cluster, load_recipe, read_shipped
from ftkit.config.request import RunRequest
from ftkit.config.training import TrainingPlan
from ftkit.files import write_json
from ftkit.models.config_json import read_shape
from ftkit.planning.layout import Workspace
from ftkit.planning.plan import RunPlan, plan_to_json
from ftkit.planning.planner import plan_run
from ftkit.runs.job import Submission, SubmittedRun
from ftkit.runs.records import EndRecord, StepRecord, to_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ftkit.models.architecture import ArchitectureSpec
    from ftkit.runs.records import Record

NOWHERE = Context(Path("/nowhere/project"), Path("/nowhere/user"), {})
OVERRIDES = ("training.max_steps=400", "training.micro_batch_size=8", "training.global_batch_size=32")
LONG_AGO = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture(scope="session", autouse=True)
def compiled_templates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep compiled templates of job scripts for all tests, since each has a home folder of its own."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ftkit.launch.templates.cache_folder", lambda _: folder)
        yield


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the drawing of charts, which takes most of a report's time, to the tests of charts."""
    monkeypatch.setattr("ftkit.cli.page.charts._svg", lambda *_: "")


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "workspace")


@pytest.fixture(scope="session")
def demo_plan() -> RunPlan:
    """The plan of the demo on the local profile, on the CPU. Shared by all tests, since specs are frozen."""
    cluster = load_cluster("local", NOWHERE).model_copy(update={"device": "cpu", "cpus_per_node": 2})
    request = RunRequest(None, None, None, None, False, Path("/nowhere"), "/venv/bin/python", LONG_AGO, "ab12")
    return plan_run(load_recipe("demo", NOWHERE, OVERRIDES), cluster, None, request)


@pytest.fixture
def plan(demo_plan: RunPlan, workspace: Workspace) -> RunPlan:
    return replace(demo_plan, workspace=workspace.root)


class RunMaker:
    """Makes run folders, each newer than the previous one."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._count = 0

    def __call__(
        self, name: str = "demo", *, scheduler: str = "slurm", job_id: str | None = None, suffix: str | None = None
    ) -> SubmittedRun:
        self._count += 1
        created = LONG_AGO + timedelta(minutes=self._count)
        suffix = suffix or f"{self._count:04x}"
        run_id = f"{name}-{created:%Y%m%dT%H%M%SZ}-{suffix}"
        cluster = self._plan.cluster.model_copy(update={"scheduler": scheduler})
        plan = replace(self._plan, id=run_id, name=name, created=created, cluster=cluster)
        plan.layout.logs.mkdir(parents=True)
        plan.layout.plan.write_text(plan_to_json(plan))
        plan.layout.script.write_text("true\n")
        submission = Submission(
            scheduler="slurm" if scheduler == "slurm" else "local",
            job_id=job_id or str(100 + self._count),
            submitted=created.timestamp(),
            host=socket.gethostname(),
        )
        write_json(plan.layout.submission, submission)
        return SubmittedRun(plan.layout, submission)


@pytest.fixture
def make_run(plan: RunPlan) -> RunMaker:
    return RunMaker(plan)


def step(number: int, loss: float = 1.5, num_steps: int = 400, **values: Any) -> StepRecord:
    known: dict[str, Any] = {
        "time": 10.0 + number,
        "epoch": 0.5,
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "tokens": number * 8192,
        "targets": number * 4096,
        "tokens_per_second": 12345.6,
        "step_seconds": 0.5,
        "overhead_ratio": 0.1,
        "data_wait_ratio": 0.0,
        "mfu": None,
        "memory_gib": None,
    }
    return StepRecord(step=number, loss=loss, num_steps=num_steps, **(known | values))


def end(outcome: Any = "completed", number: int = 400, export: str | None = "/w/export") -> EndRecord:
    time = LONG_AGO.timestamp() + 86_400
    return EndRecord(time=time, outcome=outcome, step=number, training_seconds=75.0, export=export)


@pytest.fixture(scope="session")
def records() -> Any:
    """Ready-made records: `records.step(10)`, `records.end()`, and `records.write(run, ...)`."""

    class Records:
        step = staticmethod(step)
        end = staticmethod(end)

        @staticmethod
        def write(run: SubmittedRun, *given: Record) -> None:
            with run.layout.metrics.open("a") as file:
                file.writelines(to_line(record) + "\n" for record in given)

    return Records


class FakePrograms:
    """Small scripts on PATH that record each call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def add(self, name: str, script: str) -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/sh\necho "$0 $*" >>"{self.folder}/calls"\n{script}\n')
        path.chmod(0o755)

    def answer(self, name: str, stdout: str = "", *, stderr: str = "", code: int = 0) -> None:
        (self.folder / f"{name}.out").write_text(stdout)
        (self.folder / f"{name}.err").write_text(stderr)
        self.add(name, f'cat "$0.out"; cat "$0.err" >&2; exit {code}')

    def calls(self, name: str = "") -> list[str]:
        try:
            lines = (self.folder / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [line.removeprefix(f"{self.folder}/") for line in lines if line.startswith(f"{self.folder}/{name}")]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePrograms:
    """Programs that a test adds to those of the machine."""
    fake = FakePrograms(tmp_path / "programs")
    monkeypatch.setenv("PATH", f"{fake.folder}:{os.environ['PATH']}")
    return fake


@pytest.fixture
def squeue_line() -> Callable[..., str]:
    def line(run: SubmittedRun, state: str, reason: str = "None", nodes: str = "n[1-2]") -> str:
        return f"{run.job_id}|{state}|{reason}|1767323100|1767326700|{nodes}|{run.layout.root}\n"

    return line


@pytest.fixture
def sacct_line() -> Callable[..., str]:
    def line(run: SubmittedRun, state: str, code: str = "0:0") -> str:
        return f"{run.job_id}|{state}|1767323100|1767326700|n[1-2]|{code}|{run.layout.root}\n"

    return line


@pytest.fixture
def read_json() -> Callable[[Path], Any]:
    return lambda path: json.loads(path.read_text())


@pytest.fixture(scope="session")
def architecture() -> Callable[[str], ArchitectureSpec]:
    """Read a shipped architecture."""
    return lambda name: read_shape(read_shipped(assets.ARCHITECTURES / f"{name}.yaml")[0], name)


@pytest.fixture(scope="session")
def training() -> Callable[..., TrainingPlan]:
    """Make a training spec from a few of its fields."""
    fields = {"sequence_length": 8192, "global_batch_size": 16, "max_steps": 1, "learning_rate": 1e-5}
    return lambda **changes: TrainingPlan.model_validate(fields | changes)
