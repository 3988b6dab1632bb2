"""When a step counts as a hang, and which rank is reported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ftkit.planning.layout import RunLayout
from ftkit.train import observers
from ftkit.train.observers import HangReport, Watchdog, describe_culprits


def test_the_time_limit_is_derived_from_previous_steps(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(observers.time, "monotonic", lambda: clock.now)
    world: Any = SimpleNamespace(rank=0, size=2)
    progress: Any = SimpleNamespace(step=0)
    watch = Watchdog(RunLayout(tmp_path), world, progress, 60.0)
    limits = []
    for seconds in [300.0, 2.0, 2.0, 2.0, 2.0, *[9.0] * 20]:  # the first step compiles
        watch.begin("batch")
        clock.now += seconds
        watch.end_step()
        clock.now += 1000.0  # a checkpoint
        limits.append(watch.limit_seconds)
    assert limits[:5] == [None, None, None, None, 60.0]
    assert limits[-1] == 90.0


HERE = HangReport("n1", 7, waits_for_batch=False)


@pytest.mark.parametrize(
    ("reports", "told"),
    [
        ({0: HERE, 2: HERE}, "no report from rank 1"),
        (
            {0: HERE, 1: HangReport("n2", 6, waits_for_batch=False), 2: HERE},
            "the others wait for rank 1 on n2 in step 6",
        ),
        ({0: HERE, 1: HangReport("n2", 7, waits_for_batch=True), 2: HERE}, "no batch yet for rank 1 on n2"),
        ({0: HERE, 1: HERE, 2: HERE}, "all ranks wait in the same step (a network"),
    ],
)
def test_the_rank_that_the_others_wait_for_is_reported(reports: dict[int, HangReport], told: str) -> None:
    assert describe_culprits(reports, 3, 7).startswith(told)


def test_only_some_of_many_ranks_are_listed() -> None:
    assert describe_culprits({}, 64, 7).endswith(" ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more")
