"""When a step counts as a hang, and what the reports of the ranks say."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ftkit.planning.layout import RunLayout
from ftkit.runs.slow_ranks import HangReport, describe_hang
from ftkit.train import watchdog
from ftkit.train.watchdog import Watchdog


def test_the_time_limit_is_derived_from_previous_steps(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock.now)
    watch = Watchdog(RunLayout(tmp_path), 0, [("n1", 1), ("n2", 2)], lambda: 0, 60.0)
    limits = []
    for seconds in [300.0, 2.0, 2.0, 2.0, 2.0, *[9.0] * 20]:  # the first step compiles
        watch.begin("batch")
        clock.now += seconds
        watch.end_step()
        clock.now += 1000.0  # a checkpoint
        limits.append(watch.limit_seconds)
    assert limits[:5] == [None, None, None, None, 60.0]
    assert limits[-1] == 90.0


WAITS = HangReport("n1", 7, "backward", 0.0, "fsdp2.py:9 in f", "all_gather [default_pg]", 12)
OTHER = replace(WAITS, host="n2")
HOSTS = {0: "n1", 1: "n2", 2: "n1"}
OTHERS = "; ranks 0, 2: in all_gather [default_pg] 12"


@pytest.mark.parametrize(
    ("report", "told"),
    [
        (None, "no report from rank 1 on n2" + OTHERS),
        (replace(OTHER, state="stopped"), "rank 1 on n2: stopped, backward of step 7, since 00:00:00 UTC" + OTHERS),
        (replace(OTHER, step=6), "rank 1 on n2: in all_gather [default_pg] 12, backward of step 6"),
        (replace(OTHER, phase="batch", collective=""), "rank 1 on n2: at fsdp2.py:9 in f, loading the batch of step 7"),
        (replace(OTHER, collective=""), "rank 1 on n2: at fsdp2.py:9 in f, backward of step 7"),
        (replace(OTHER, number=11), "rank 1 on n2: in all_gather [default_pg] 11, backward of step 7"),
        (
            replace(OTHER, collective="broadcast [default_pg]"),
            "ranks execute different code: ranks 0, 2: in all_gather [default_pg] 12, backward of step 7, since",
        ),
        (OTHER, "all ranks wait in the same place (the network?): in all_gather [default_pg] 12"),
    ],
)  # fmt: skip
def test_the_rank_that_the_others_wait_for_is_reported(report: HangReport | None, told: str) -> None:
    reports = {rank: each for rank, each in enumerate([WAITS, report, WAITS]) if each}
    assert describe_hang(reports, HOSTS).startswith(told)


def test_only_some_of_many_ranks_are_listed() -> None:
    silent = dict.fromkeys(range(64), "n1")
    assert describe_hang({}, silent) == "no report from ranks 0, 1, 2, 3, 4, 5, 6, 7, and 56 more on n1"
