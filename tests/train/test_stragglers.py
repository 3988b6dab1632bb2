"""A slow rank is detected although all ranks' steps take equally long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forked_ranks import SLOW_RANK

from ftkit.runs.stragglers import find_stragglers, read_timings

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest
    from conftest import Run


def test_a_slow_rank_is_reported_and_the_others_waiting_time_is_recorded(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(
        "straggler", "training.max_steps=24", "training.checkpoint_every_steps=1000", "evaluation.sql_execution=null",
        "resources.exclude_stragglers=true",
    )  # fmt: skip
    monkeypatch.setenv(SLOW_RANK, "1")
    run.train()
    first, second = timings = read_timings(run.layout)
    assert (first.num_steps, second.num_steps) == (24, 24)
    assert second.compute_seconds > 1.5 * first.compute_seconds
    assert first.collective_wait_seconds > second.collective_wait_seconds
    (found,) = find_stragglers(timings)
    assert found.ranks == (1,)
    assert f"node {found.host} is {found.reason}" in run.layout.rank_log(0).read_text()
    assert run.layout.stragglers.read_text() == f"{found.host}\t{found.reason}\n"
