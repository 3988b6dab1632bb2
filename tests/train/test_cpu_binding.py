from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ftkit.train.world import bind_to_gpu

if TYPE_CHECKING:
    from pathlib import Path

BUS_IDS = ("0000:0a:00.0", "0000:0B:00.0", "0000:8a:00.0", "0000:8b:00.0")


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """A machine with 32 CPUs; records what processes are bound to."""
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bound.append(set(cpus)))
    monkeypatch.setattr("ftkit.train.world.num_usable_cpus", lambda: 32)
    return bound


def with_layout(root: Path, numa: dict[str, int]) -> Path:
    for bus_id, node in numa.items():
        folder = root / "sys/bus/pci/devices" / bus_id.lower()
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    for node, cpus in ((0, "0-7,16-23"), (1, "8-15,24-31")):
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    return root


def test_ranks_share_the_cpus_local_to_their_gpus(tmp_path: Path, bound: list[set[int]]) -> None:
    root = with_layout(tmp_path, dict(zip(BUS_IDS, (0, 0, 0, 1), strict=True)))
    assert [bind_to_gpu(BUS_IDS, rank, root) for rank in range(4)] == [5, 5, 5, 16]
    assert bound[3] == {*range(8, 16), *range(24, 32)}


def test_cpus_that_slurm_hides_from_a_process_stay_hidden(
    tmp_path: Path, bound: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = with_layout(tmp_path, dict.fromkeys(BUS_IDS, 1))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6, 12)))
    assert bind_to_gpu(BUS_IDS[:1], 0, root) == 4
    assert bound == [{8, 9, 10, 11}]


@pytest.mark.parametrize("node", [-1, 7])
def test_without_a_known_topology_cpus_are_divided_but_not_bound(
    tmp_path: Path, bound: list[set[int]], node: int
) -> None:
    root = with_layout(tmp_path, dict.fromkeys(BUS_IDS, node))
    assert bind_to_gpu(BUS_IDS, 0, root) == 8
    assert bind_to_gpu(BUS_IDS, 0, tmp_path / "nowhere") == 8
    assert bound == []
