"""Tests that need GPUs; without one they are skipped."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.train.distributed.world import World


def pytest_runtest_setup() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU is here")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """This process as the only one of a run, on the first GPU."""
    from ftkit.planning.plan import PlacementPlan
    from ftkit.train.distributed.world import joined_world

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with pytest.MonkeyPatch.context() as patch:
        for key, value in variables.items():
            patch.setenv(key, value)
        with joined_world(PlacementPlan(1, 1, "cuda", 1)) as world:
            yield world
