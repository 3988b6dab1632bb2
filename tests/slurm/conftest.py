"""A real Slurm, and ftkit on its login node as an ordinary user."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from waiting import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHECKOUT = Path(__file__).parents[2]
DEV_CLUSTER = CHECKOUT / "scripts" / "dev-cluster"
STATE = Path(os.environ.get("FTKIT_DEV_CLUSTER_DIR", "/var/lib/ftkit-dev-cluster"))
TINY = "tests/train/tiny.yaml"
SKIPPED = 77
EVERYTHING_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if EVERYTHING_HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@dataclass(frozen=True)
class Cluster:
    """The login node, and the power switches of the others."""

    def ftkit(
        self, *arguments: str, expect: int = 0, timeout: int = PATIENCE_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        done = self.execute(str(self.ftkit_program), *arguments, timeout=timeout)
        assert done.returncode == expect, done.stdout + done.stderr
        assert "Traceback (most recent call last)" not in done.stdout or arguments[0] in {"run", "status", "logs"}
        return done

    @property
    def ftkit_program(self) -> Path:
        """The program as the login node sees it."""
        return CHECKOUT / ".venv" / "bin" / "ftkit"

    def execute(self, *command: str, timeout: int = PATIENCE_SECONDS) -> subprocess.CompletedProcess[str]:
        full = [str(DEV_CLUSTER), "exec", "--", *command]
        return subprocess.run(full, cwd=CHECKOUT, capture_output=True, text=True, timeout=timeout, check=False)

    def switch(self, verb: str, node: str) -> None:
        subprocess.run([str(DEV_CLUSTER), verb, node], check=True, capture_output=True, timeout=PATIENCE_SECONDS)

    def kill(self, node: str, pattern: str) -> None:
        """Kill all processes of a node whose command lines match."""
        command = [str(DEV_CLUSTER), "node", node, "--", "pkill", "-KILL", "-f", "--", pattern]
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_SECONDS)

    def folder(self, run: str) -> Path:
        """Return a run's folder."""
        return STATE / "shared" / "runs" / run

    def nodes(self, job: str) -> list[str]:
        """Return the nodes of a job."""
        listed = self.execute("squeue", "--noheader", "--jobs", job, "--format=%N").stdout.strip()
        return self.execute("scontrol", "show", "hostnames", listed).stdout.split()

    @contextmanager
    def default_timeouts(self) -> Iterator[None]:
        """Let Slurm notice dead nodes as late as it does when nobody sets its time-outs."""
        self._set_timeouts(SlurmdTimeout=300, MessageTimeout=10, KillWait=30)
        try:
            yield
        finally:
            self._set_timeouts(SlurmdTimeout=10, MessageTimeout=5, KillWait=5)

    def _set_timeouts(self, **seconds: int) -> None:
        file = STATE / "etc" / "slurm.conf"
        text = file.read_text(encoding="utf-8")
        for name, value in seconds.items():
            text, count = re.subn(rf"(?m)^{name}=.*$", f"{name}={value}", text)
            assert count == 1
        file.write_text(text, encoding="utf-8")
        subprocess.run([str(DEV_CLUSTER), "node", "n1", "scontrol", "reconfigure"], check=True)

    def declare_dead(self, node: str) -> None:
        """Spare the test the minutes after which Slurm would notice by itself."""
        command = ("scontrol", "update", f"nodename={node}", "state=down", "reason=dead")
        subprocess.run([str(DEV_CLUSTER), "node", "n1", *command], check=True)

    def submit(self, name: str, *arguments: str) -> str:
        """Start a run on two nodes without following it; return its id."""
        done = self.ftkit("run", TINY, "--cluster", "dev", "--nodes", "2", "--name", name, "--no-follow", *arguments)
        return done.stdout.strip().splitlines()[-1].split()[-1]

    def status(self, run: str) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.ftkit("status", run, "--json").stdout)
        return status

    def wait(
        self, run: str, condition: Callable[[dict[str, Any]], bool], seconds: int = PATIENCE_SECONDS
    ) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while not condition(status := self.status(run)):
            assert not status["is_final"], self.explain(run)
            assert time.monotonic() < deadline, self.explain(run)
            time.sleep(1)
        return status

    def wait_for_log(self, run: str, text: str, seconds: int = PATIENCE_SECONDS) -> str:
        """Wait until the job's log holds a text; return the log."""
        deadline = time.monotonic() + seconds
        while text not in (log := self.execute("ftkit", "logs", run).stdout):
            assert time.monotonic() < deadline, self.explain(run)
            time.sleep(1)
        return log

    def wait_for_completion(self, run: str, seconds: int = PATIENCE_SECONDS) -> dict[str, Any]:
        status = self.wait(run, lambda status: status["is_final"], seconds)
        assert status["state"] == "completed", self.explain(run)
        return status

    def explain(self, run: str) -> str:
        return f"{self.execute('ftkit', 'status', run).stdout}\n{self.execute('ftkit', 'logs', run).stdout}"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    up = subprocess.run([str(DEV_CLUSTER), "up"], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    if up.returncode == SKIPPED:
        pytest.skip(up.stderr.strip())
    assert up.returncode == 0, up.stdout + up.stderr
    yield Cluster()
    subprocess.run([str(DEV_CLUSTER), "down"], check=True, capture_output=True, timeout=PATIENCE_SECONDS)


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that all machines see and everybody may read: each has a /tmp of its own."""
    with tempfile.TemporaryDirectory(prefix=".weights-", dir=CHECKOUT) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
