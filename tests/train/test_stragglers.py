"""A slow rank is detected although all ranks' steps take equally long."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from forked_ranks import SLOW_RANK

from ftkit.files import write_json
from ftkit.planning.layout import RunLayout
from ftkit.runs.slow_ranks import RankTiming, find_stragglers, read_timings
from ftkit.train.observers import RankTimes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Run

    from ftkit.train.world import World


def test_a_slow_rank_is_found_by_the_time_between_collectives(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(
        "straggler", "training.max_steps=24", "training.checkpoint_every_steps=1000", "evaluation.generation=null",
        "resources.exclude_stragglers=true",
    )  # fmt: skip
    monkeypatch.setenv(SLOW_RANK, "1")
    run.train()
    first, second = timings = read_timings(run.layout)
    assert (first.num_steps, second.num_steps) == (24, 24)
    assert second.compute_seconds > 1.5 * first.compute_seconds
    assert "slower than" not in run.layout.rank_log(0).read_text()  # of a CPU, that is no finding
    assert run.layout.stragglers.read_text() == ""
    (found,) = find_stragglers(replace(each, device="cuda") for each in timings)
    assert found.ranks == (1,)


@pytest.mark.parametrize("hosts", [("h0", "h0"), ("h0", "h1")])
def test_slow_gpus_are_logged_and_their_node_is_left_to_the_job_script(
    hosts: tuple[str, str], world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = RunLayout(tmp_path)
    layout.logs.mkdir()
    resources = SimpleNamespace(exclude_stragglers=True)
    plan = SimpleNamespace(layout=layout, recipe=SimpleNamespace(resources=resources))
    times = RankTimes(SimpleNamespace(plan=plan), world, ())  # type: ignore[arg-type]
    for rank, seconds in enumerate((1.0, 1.5)):
        write_json(layout.rank_timing(rank), RankTiming(rank, hosts[rank], "cuda", 24, 24, 2.0, seconds))
    times.report_stragglers()
    times.report_stragglers()
    (found,) = find_stragglers(read_timings(layout))
    assert [record.message for record in caplog.records] == [str(found)]
    assert layout.stragglers.read_text() == f"{hosts[1]}\t{found.reason}\n"
