"""How tests run: none depends on the clock or on how pytest was started, and a CI job that was green stays green."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("here", UNTIMED)
settings.register_profile("repeatable", UNTIMED, derandomize=True)
settings.load_profile("repeatable" if os.environ.get("CI") else "here")

os.environ.setdefault("FTKIT_REPORT", "0")  # seconds of drawing for each run that is trained

# Programs that a shell starts in the background ignore SIGINT, and so do those that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Run all files that use the one Slurm in one process: the first to end would take it down for the others."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneProcessForSlurm(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/slurm" if nodeid.startswith("tests/slurm/") else str(super()._split_scope(nodeid))

    return OneProcessForSlurm(config, log)
