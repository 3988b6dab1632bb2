"""This process as the only one of a run."""

from __future__ import annotations

import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.train.world import World


@contextmanager
def lone_world(device: Literal["cpu", "cuda"]) -> Iterator[World]:
    """Join a world of size 1, as under torchrun.

    At the end, `torch.nn.functional.linear` is torch's own again: DeepSpeed replaces it for the rest of the process,
    where the tests of other files would compile other graphs.
    """
    import torch

    from ftkit.planning.plan import PlacementPlan
    from ftkit.train.world import init_world

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
        patch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)
        with init_world(PlacementPlan(1, 1, device, 1)) as world:
            yield world
