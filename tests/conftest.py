"""Settings for all tests: independent of the clock, of how pytest was started, and most of them of the machine."""

from __future__ import annotations

import gc
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from machine import Machine

if TYPE_CHECKING:
    from collections.abc import Generator

    from xdist.scheduler import LoadFileScheduling

UNTIMED = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("here", UNTIMED)
settings.register_profile("repeatable", UNTIMED, derandomize=True)
settings.load_profile("repeatable" if os.environ.get("CI") else "here")

os.umask(0o022)  # what tests write, and the bytecode of ftkit, can be read by the users of other tests
os.environ.setdefault("FTKIT_REPORT", "0")  # saves seconds of plotting per trained run
# Before torch is imported: spinning threads of several tests at once take the CPUs from each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Background processes of a shell ignore SIGINT, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path(__file__).parent
SEALED = (HERE / "unit", HERE / "commands", HERE / "jobs", HERE / "train" / "test_data_commands.py")
"""Tests that see only `Machine`. The others need Slurm, a docker engine, sshd, GPUs, compilers, or the network."""
WAITING = {"images", "packaging", "remote"}
"""Folders whose tests wait for a docker engine, pip, or connections."""
MACHINE = pytest.StashKey[Machine]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MACHINE] = machine = Machine()
    config.add_cleanup(machine.remove)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with Slurm's tests, which take longest, and spread other files that wait over those that compute."""
    groups: dict[bool, list[Path]] = {}
    for path in dict.fromkeys(item.path for item in items):
        groups.setdefault(path.parent.name in WAITING, []).append(path)
    places = {path: place / len(group) for group in groups.values() for place, path in enumerate(group)}
    items.sort(key=lambda item: (item.path.parent.name != "slurm", places[item.path]))


def pytest_collection_finish() -> None:
    gc.freeze()  # else each full search for garbage visits all modules and tests


def _sealed(node: pytest.Item | pytest.Collector) -> Any:
    is_sealed = any(node.path.is_relative_to(place) for place in SEALED)
    return node.config.stash[MACHINE].entered() if is_sealed else nullcontext()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    with _sealed(collector):  # for modules that read the environment when they are imported
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    with _sealed(item):  # around the fixtures of modules and of the session too
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Run a file in one worker, so that its runs are shared; all files of Slurm too, whose first to end would stop it.

    Commands and jobs share nothing, and take minutes: each of their tests may run anywhere.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class SharedRuns(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(("tests/commands/", "tests/jobs/")):
                return nodeid
            return "tests/slurm" if nodeid.startswith("tests/slurm/") else str(super()._split_scope(nodeid))

        def remove_node(self, node: Any) -> str | None:
            """Give up the test that ended a worker: xdist would run it again, and end one worker after the other."""
            work = self.assigned_work.pop(node)
            pending = [(unit, test) for unit in work.values() for test, is_done in unit.items() if not is_done]
            if not pending:
                return None
            unit, ended = pending[0]
            unit[ended] = True
            self.workqueue.update({scope: unit for scope, unit in work.items() if not all(unit.values())})
            for other in self.assigned_work:
                self._reschedule(other)
            return ended

    return SharedRuns(config, log)
