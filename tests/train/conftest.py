"""Runs of the trainer as a job script starts it, on models that train in seconds."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from forked_ranks import ForkedRanks
from lone_world import lone_world
from waiting import PATIENCE_SECONDS

from ftkit.config.context import Context
from ftkit.config.load import load_cluster, load_recipe
from ftkit.config.request import RunRequest
from ftkit.data.prepare import prepare
from ftkit.data.staging import export_weights
from ftkit.launch.model import resolve_model
from ftkit.planning.layout import Workspace
from ftkit.planning.plan import RunPlan, plan_to_json
from ftkit.planning.planner import plan_run
from ftkit.runs.failure import first_error
from ftkit.runs.metrics_file import read_records
from ftkit.runs.records import MemoryRecord, Record, StepRecord
from ftkit.spec import RUN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ftkit.planning.layout import RunLayout
    from ftkit.runs.failure import RankError
    from ftkit.train.world import World

TINY = Path(__file__).with_name("tiny.yaml")
EVERYTHING_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if EVERYTHING_HERE in item.path.parents:
            item.add_marker(pytest.mark.train)


@dataclass
class Run:
    """A run folder, and the trainer on it."""

    plan: RunPlan
    ranks: ForkedRanks

    @property
    def layout(self) -> RunLayout:
        return self.plan.layout

    def train(self, *program: str, expect: int = 0) -> str:
        """Train in forked ranks, which have torch imported already; return what they printed."""
        output, size = self._write_plan().with_name("output"), self.plan.placement.world_size
        code = self.ranks.run(self.layout.plan, size, output, *program, timeout=PATIENCE_SECONDS)
        printed = output.read_text()
        assert code == expect, printed
        return printed

    def train_here(self, world: World) -> None:
        """Train in this process as a world of size 1: the cheapest way for several single-process runs."""
        from ftkit.train.trainer import run_training

        self._write_plan()
        run_training(self.plan, world)

    def _write_plan(self) -> Path:
        self.layout.root.mkdir(parents=True, exist_ok=True)
        self.layout.plan.write_text(plan_to_json(self.plan))
        return self.layout.plan

    def records(self, kind: type[Record]) -> list[Record]:
        return [record for record in read_records(self.layout.metrics) if isinstance(record, kind)]

    def first_error(self) -> RankError:
        """Return the error that ended the run. If several ranks fail, any of them may be recorded as the first."""
        error = first_error(self.layout, since=0)
        assert error is not None
        return error

    def losses(self) -> dict[int, tuple[float, float]]:
        steps = [record for record in read_records(self.layout.metrics) if isinstance(record, StepRecord)]
        return {record.step: (record.loss, record.grad_norm) for record in steps}

    def memory_stages(self) -> list[str]:
        return [record.stage for record in read_records(self.layout.metrics) if isinstance(record, MemoryRecord)]

    def copy_to(self, name: str) -> Run:
        """Return a run that is a copy of this one as it is now, under another id."""
        copied = replace(self, plan=replace(self.plan, id=name))
        shutil.copytree(self.layout.root, copied.layout.root)
        return copied

    def forget_after(self, step: int) -> None:
        """Remove everything after a step, as if the run had been killed after its checkpoint."""
        for folder in self.layout.checkpoints.glob("step-*"):
            if int(folder.name.removeprefix("step-")) > step:
                shutil.rmtree(folder)
        shutil.rmtree(self.layout.export, ignore_errors=True)
        self.layout.metrics.unlink()


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One workspace for all runs of a session, so that the data is prepared once."""
    return tmp_path_factory.mktemp("workspace")


@pytest.fixture(scope="session")
def ranks() -> Iterator[ForkedRanks]:
    with ForkedRanks() as ranks:
        yield ranks


@pytest.fixture(scope="session")
def run_of(ranks: ForkedRanks) -> Callable[[RunPlan], Run]:
    return partial(Run, ranks=ranks)


@pytest.fixture(scope="session")
def make_run(workspace: Path, ranks: ForkedRanks) -> Callable[..., Run]:
    def make(name: str, *overrides: str, processes: int = 2, base: Path = TINY) -> Run:
        ctx = Context.here()
        recipe = load_recipe(str(base), ctx, overrides)
        local = load_cluster("local", ctx)
        cluster = local.model_copy(
            update={"device": "cpu", "processes_per_node": processes, "cpus_per_node": processes}
        )
        request = RunRequest(name, None, None, None, False, workspace, sys.executable, datetime.now(UTC), "test")
        if recipe.model.weights.startswith(RUN) or recipe.model.added_tokens:
            request = replace(request, model=resolve_model(recipe.model, os.environ, Workspace(workspace)))
        plan = plan_run(recipe, cluster, None, request)
        run = Run(replace(plan, id=name), ranks)
        export_weights(run.plan, lambda _: None)
        prepare(run.plan, lambda _: None)
        return run

    return make


@pytest.fixture(scope="session")
def finished_run(make_run: Callable[..., Run]) -> Run:
    """A finished run of 20 steps on two processes. Tests copy it instead of changing it."""
    run = make_run("finished")
    run.train()
    return run


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """This process as a world of size 1."""
    with lone_world("cpu") as world:
        yield world


def read_json(path: Path) -> dict[str, object]:
    loaded: dict[str, object] = json.loads(path.read_text())
    return loaded
