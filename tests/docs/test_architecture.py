"""The architecture page names files that exist, and their ways follow the imports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
PAGE = (CHECKOUT / "docs" / "reference" / "architecture.md").read_text()


def test_each_file_of_the_page_exists() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    assert named
    assert [name for name in named if not (CHECKOUT / "ftkit" / name).is_file()] == []


@pytest.mark.parametrize(("way", "most"), [("run", 10), ("row", 8), ("checkpoint", 6)])
def test_a_way_passes_few_files(way: str, most: int) -> None:
    section = PAGE.partition(f"## The way of a {way}")[2].partition("\n## ")[0]
    assert 1 < len(re.findall(r"^\| `[\w/]+\.py`", section, re.MULTILINE)) <= most
