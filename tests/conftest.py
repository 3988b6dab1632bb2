"""Settings for all tests: independent of the clock and of how pytest was started."""

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

os.environ.setdefault("FTKIT_REPORT", "0")  # saves seconds of plotting per trained run
# Before torch is imported: spinning threads of several tests at once take the CPUs from each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Background processes of a shell ignore SIGINT, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Run all files that use Slurm in one worker: otherwise the first to finish would stop it for the others."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneProcessForSlurm(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/slurm" if nodeid.startswith("tests/slurm/") else str(super()._split_scope(nodeid))

    return OneProcessForSlurm(config, log)
