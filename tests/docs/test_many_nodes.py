"""The arithmetic of docs/reference/many-nodes.md follows the formulas on that page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/reference/many-nodes.md").read_text(encoding="utf-8")
SHARED = {"BASIC_SSD": 1200 * 2**20 / 1e9, "HIGH_SCALE_SSD": 2600 * 2**20 / 1e9, "FSx": 100 * 1000 / 1e3}
NETWORK = (2.5, 200 / 8)
IMAGE_GB, WEIGHTS_GB = 20, 64


def rows(title: str) -> dict[int, list[float]]:
    """Return the numbers of a table whose rows are numbers of nodes."""
    table = PAGE.partition(f"| {title}")[2].partition("\n\n")[0]
    found = {}
    for line in table.splitlines()[2:]:
        nodes, *cells = line.strip("| ").split(" | ")
        numbers = re.findall(r"[\d.,]+", " ".join(cells))
        found[int(nodes.split()[0].replace(",", ""))] = [float(each.replace(",", "")) for each in numbers]
    return found


def tree(size: float, nodes: int, bandwidth: float) -> float:
    """Return the seconds of sbcast, level by level, with a fan-out of eight."""
    levels = next(depth for depth in range(1, 20) if 8**depth >= nodes)
    return 8 * size * levels / bandwidth


def test_the_seconds_of_the_table_follow_from_the_bandwidths() -> None:
    shared = SHARED.values()
    for nodes, shown in rows("image of 20 GB").items():
        expected = [IMAGE_GB * nodes / each for each in shared] + [tree(IMAGE_GB, nodes, each) for each in NETWORK]
        assert shown == pytest.approx(expected, rel=0.025), nodes
    assert list(rows("image of 20 GB")) == [2, 16, 128, 1024]


def test_the_seconds_of_reading_weights_follow_from_the_bandwidths() -> None:
    shown = re.findall(r"64 GB in ([\d.]+), ([\d.]+) or ([\d.]+) s", PAGE.replace("\n", " "))
    assert [float(each) for each in shown[0]] == pytest.approx(
        [WEIGHTS_GB / each for each in SHARED.values()], rel=0.07
    )


def test_the_named_bandwidths_are_those_of_the_tables() -> None:
    named = [float(number) for number in re.findall(r"\| \*F\* = ([\d.]+) \|", PAGE)]
    assert set(named) == {round(each, 2) for each in SHARED.values()}


def test_counts_at_1024_nodes_are_those_of_eight_processes_per_node() -> None:
    nodes, processes = 1024, 8 * 1024
    for number, what in (
        (processes + nodes, "connections"),
        (processes, "files per checkpoint"),
        (nodes - 1, "packets per second"),
    ):
        assert f"{number:,} {what}" in PAGE
