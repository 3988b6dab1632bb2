"""Tests that need GPUs; skipped without a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from lone_world import lone_world

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.train.world import World


HERE = Path(__file__).parent
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read at its first use; test_repeats.py needs it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Show warnings, instead of failing: the GPU libraries here come from the machine, in any version."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_runtest_setup() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU available")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """This process as a world of size 1, on the first GPU."""
    with lone_world("cuda") as world:
        yield world
