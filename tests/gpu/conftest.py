"""Tests that need GPUs; skipped without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from lone_world import lone_world

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.train.world import World


def pytest_runtest_setup() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU available")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """This process as a world of size 1, on the first GPU."""
    with lone_world("cuda") as world:
        yield world
