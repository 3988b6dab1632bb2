"""Stragglers, from measurements of the ranks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ftkit.files import write_json
from ftkit.planning.layout import RunLayout
from ftkit.runs.slow_ranks import MIN_STEPS, RankTiming, Straggler, find_stragglers, read_timings


def timing(rank: int, compute: float, *, per_host: int = 8, num_steps: int = 100) -> RankTiming:
    return RankTiming(rank, f"h{rank // per_host}", "cuda", 500, num_steps, 2.0, compute)


def test_only_the_host_of_a_slow_rank_is_a_straggler() -> None:
    noise = random.Random(1)
    timings = [timing(rank, 0.2 * (1.14 if rank == 139 else 1) + noise.uniform(0, 0.004)) for rank in range(256)]
    (found,) = find_stragglers(timings)
    assert (found.host, found.ranks) == ("h17", (139,))
    assert found.slowdown == pytest.approx(0.14, abs=0.02)
    assert str(found).startswith("node h17 is 1")
    assert found.reason.endswith("slower than the others (rank 139)")


def test_of_a_single_host_the_slow_gpus_are_named_and_not_the_node() -> None:
    (found,) = find_stragglers([timing(rank, 1.3 if rank == 2 else 1.0) for rank in range(8)])
    assert str(found).startswith("GPU 2 of h0 is 30% slower")


@pytest.mark.parametrize("per_host", [1, 8])
def test_ranks_on_cpus_are_not_compared(per_host: int) -> None:
    timings = [timing(rank, 1.3 if rank == 2 else 1.0, per_host=per_host) for rank in range(8)]
    assert find_stragglers(timings)
    assert find_stragglers([replace(each, device="cpu") for each in timings]) == []


@pytest.mark.parametrize(
    ("computes", "per_host", "expected"),
    [
        ((1.0, 1.2), 1, [("h1", (1,))]),  # a faster host is not a fault
        ((1.0, 1.0, 1.2, 1.0), 4, [("h0", (2,))]),  # on a single host, ranks are compared with each other
        ((1.0, 1.0, 1.3, 1.3, 1.2, 1.0, 1.0, 1.0), 2, [("h1", (2, 3)), ("h2", (4,))]),  # slowest first
        ((1.0, 1.09), 1, []),
        ((1.0, 0.0), 1, []),  # nothing was measured
        ((1.0,), 1, []),
    ],
)
def test_ranks_are_compared_with_those_of_other_hosts(
    computes: tuple[float, ...], per_host: int, expected: list[tuple[str, tuple[int, ...]]]
) -> None:
    found = find_stragglers([timing(rank, each, per_host=per_host) for rank, each in enumerate(computes)])
    assert [(each.host, each.ranks) for each in found] == expected


def test_a_few_steps_are_not_enough() -> None:
    assert find_stragglers([timing(0, 1, per_host=1), timing(1, 2, per_host=1, num_steps=MIN_STEPS - 1)]) == []


def test_damaged_files_are_ignored(tmp_path_factory: pytest.TempPathFactory) -> None:
    layout = RunLayout(tmp_path_factory.mktemp("run"))
    layout.logs.mkdir()
    write_json(layout.rank_timing(0), timing(0, 1.0))
    write_json(layout.rank_timing(1), timing(1, 1.0))
    layout.rank_timing(1).write_text("{")
    (layout.logs / "timing-x.json").write_text("[]")
    assert read_timings(layout) == [timing(0, 1.0)]


def test_many_ranks_are_not_all_listed() -> None:
    assert "(ranks 0, 1, 2, 3, 4, 5, 6, 7, and 2 more)" in Straggler("h1", tuple(range(10)), 0.2).reason
