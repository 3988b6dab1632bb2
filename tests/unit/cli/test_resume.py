"""`ftkit resume` with changes, through the command line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ftkit.planning.plan import read_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import FakePrograms, Result, RunMaker


def test_a_run_resumed_on_more_processes_is_planned_with_its_changes_shown(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms
) -> None:
    run = make_run()
    before = read_plan(run.layout).placement.processes_per_node
    for name, answer in {"squeue": "", "sacct": "", "sbatch": "2\n"}.items():
        programs.answer(name, answer)
    run.layout.manifest.write_text("{}")
    words = ("--processes-per-node", "4", "--time", "02:00:00", "training.max_steps=500", "--no-follow")
    result = ftkit("resume", run.id, *words)
    assert (result.code, result.out) == (0, f"{run.id}\n"), result.err
    told = " ".join(result.err.split())
    assert f"processes per node {before} → 4" in told
    assert "8 × 4 processes × 1" in told
    assert "the cosine schedule" in result.err
    plan = read_plan(run.layout)
    assert (plan.num_steps, plan.recipe.resources.time_limit, plan.placement.world_size) == (500, "02:00:00", 4)
    assert "--time=02:00:00" in run.layout.script.read_text()
    (submission,) = json.loads(run.layout.manifest.read_text())["submissions"]
    assert submission["command"] == ["ftkit", "resume", run.id, *words]


def test_nothing_is_submitted_if_changes_are_rejected(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms
) -> None:
    run = make_run()
    before = run.layout.plan.read_bytes()
    result = ftkit("resume", run.id, "training.learning_rate=1", "training.seed=3")
    assert result.code == 3
    assert "--allow training.learning_rate" in result.err
    assert "--allow training.seed" in result.err
    assert (programs.calls(), run.layout.plan.read_bytes()) == ([], before)
    assert ftkit("resume", run.id, "another-recipe").code == 2


def test_a_time_limit_at_which_each_job_would_stop_at_once_is_rejected(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms
) -> None:
    run = make_run()
    result = ftkit("resume", run.id, "--time", "3")
    assert (result.code, programs.calls()) == (3, [])
    assert "resources.time_limit: 3 is too short" in " ".join(result.err.split())
    for name, answer in {"squeue": "", "sacct": "", "sbatch": "2\n"}.items():
        programs.answer(name, answer)
    assert ftkit("resume", run.id, "--time", "00:03:01", "--no-follow").code == 0
