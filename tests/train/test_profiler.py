from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ftkit.config.recipe import ProfileSpec
from ftkit.errors import TrainingError
from ftkit.planning.layout import RunLayout
from ftkit.train.loop import Observers
from ftkit.train.observers import Profiler, check_profile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ftkit.train.world import World

pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # one trace per cycle is intended

SPEC = ProfileSpec(enabled=True, wait_steps=1, warmup_steps=1, active_steps=2, cycles=2)


def steps_in(trace: Path) -> list[str]:
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    return sorted({event["name"] for event in events if event["name"].startswith("ProfilerStep#")})


def take_steps(spec: ProfileSpec, layout: RunLayout, world: World, num_steps: int) -> list[str]:
    profiler = Profiler(spec, layout, world)
    with Observers([profiler]).attached():
        for _ in range(num_steps):
            torch.ones(8, device=world.device).sum()
            profiler.end_step()
    return sorted(path.name for path in layout.profile.glob("*"))


def test_each_cycle_writes_a_trace_of_its_active_steps(world: World, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    assert take_steps(SPEC, layout, world, 10) == ["rank-0-cycle-0.trace.json.gz", "rank-0-cycle-1.trace.json.gz"]
    assert steps_in(layout.profile_trace(0, 0)) == ["ProfilerStep#2", "ProfilerStep#3"]
    assert steps_in(layout.profile_trace(0, 1)) == ["ProfilerStep#6", "ProfilerStep#7"]


def test_a_resumed_run_keeps_its_profile(world: World, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    take_steps(SPEC, layout, world, 8)
    before = layout.profile_trace(0, 1).stat().st_mtime_ns
    take_steps(SPEC, layout, world, 8)
    assert layout.profile_trace(0, 1).stat().st_mtime_ns == before


@pytest.mark.parametrize("spec", [ProfileSpec(), SPEC.model_copy(update={"ranks": (1,)})])
def test_nothing_is_profiled_by_default(spec: ProfileSpec, world: World, tmp_path: Path) -> None:
    assert take_steps(spec, RunLayout(tmp_path), world, 8) == []


def test_a_failing_run_writes_its_partial_trace(world: World, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)

    def fail() -> None:
        profiler = Profiler(SPEC, layout, world)
        with Observers([profiler]).attached():
            for _ in range(3):
                profiler.end_step()
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert steps_in(layout.profile_trace(0, 0))[0] == "ProfilerStep#2"


def test_a_run_shorter_than_its_profile_is_rejected() -> None:
    check_profile(SPEC, 8)
    with pytest.raises(TrainingError, match=r"8 steps.* 7"):
        check_profile(SPEC, 7)


def test_a_run_writes_a_trace_of_the_chosen_rank(make_run: Callable[..., Any]) -> None:
    run = make_run(
        "profiled",
        "profile.enabled=true", "profile.wait_steps=1", "profile.warmup_steps=1", "profile.active_steps=2",
        "profile.ranks=[1]", "training.max_steps=4", "evaluation.generation=null",
    )  # fmt: skip
    run.train()
    (trace,) = run.layout.profile.iterdir()
    assert trace == run.layout.profile_trace(1, 0)
    assert steps_in(trace) == ["ProfilerStep#2", "ProfilerStep#3"]
    with gzip.open(trace) as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in names


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_memory_history_is_written(world: World, tmp_path: Path) -> None:
    from dataclasses import replace

    on_gpu = replace(world, device=torch.device("cuda", 0))
    assert "rank-0.memory.pickle" in take_steps(SPEC, RunLayout(tmp_path), on_gpu, 8)
