"""A real Slurm cluster, and ftkit on its login node as an ordinary user."""

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
_ENDLESS = (
    "--with-code", "tests/slurm/slow_steps", "training.max_steps=1000000", "training.log_every_steps=1",
    "evaluation.generation=null",
)  # fmt: skip
SKIPPED = 77
_ACTIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"}
EVERYTHING_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if EVERYTHING_HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@dataclass(frozen=True)
class Cluster:
    """The login node, and control over the power of the other nodes."""

    def ftkit(
        self, *arguments: str, expect: int = 0, timeout: int = PATIENCE_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        done = self.execute(str(self.ftkit_program), *arguments, timeout=timeout)
        assert done.returncode == expect, done.stdout + done.stderr
        assert "Traceback (most recent call last)" not in done.stdout or arguments[0] in {"run", "status", "logs"}
        return done

    @property
    def ftkit_program(self) -> Path:
        """The path of the program on the login node."""
        return CHECKOUT / ".venv" / "bin" / "ftkit"

    def execute(self, *command: str, timeout: int = PATIENCE_SECONDS) -> subprocess.CompletedProcess[str]:
        full = [str(DEV_CLUSTER), "exec", "--", *command]
        return subprocess.run(full, cwd=CHECKOUT, capture_output=True, text=True, timeout=timeout, check=False)

    def switch(self, *words: str) -> None:
        subprocess.run([str(DEV_CLUSTER), *words], check=True, capture_output=True, timeout=PATIENCE_SECONDS)

    def kill(self, node: str, pattern: str) -> None:
        """Kill all processes of a node whose command lines match."""
        command = [str(DEV_CLUSTER), "node", node, "--", "pkill", "-KILL", "-f", "--", pattern]
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_SECONDS)

    def folder(self, run: str) -> Path:
        """Return a run's folder."""
        return STATE / "shared" / "runs" / run

    @property
    def profiles(self) -> Path:
        """The user's cluster profiles."""
        return STATE / "home" / ".config" / "ftkit" / "clusters"

    @property
    def slurm_version(self) -> tuple[int, ...]:
        """The version's first two numbers."""
        return tuple(int(part) for part in re.findall(r"\d+", self.execute("sinfo", "--version").stdout)[:2])

    def nodes(self, job: str) -> list[str]:
        """Return the nodes of a job."""
        listed = self.execute("squeue", "--noheader", "--jobs", job, "--format=%N").stdout.strip()
        return self.execute("scontrol", "show", "hostnames", listed).stdout.split()

    @contextmanager
    def default_timeouts(self) -> Iterator[None]:
        """Use Slurm's default time-outs for dead nodes."""
        reconfigure = ("node", "n1", "scontrol", "reconfigure")
        self._configure(SlurmdTimeout="300", MessageTimeout="10", KillWait="30")
        self.switch(*reconfigure)
        try:
            yield
        finally:
            self._configure(SlurmdTimeout="10", MessageTimeout="5", KillWait="5")
            self.switch(*reconfigure)

    def _configure(self, **values: str) -> None:
        file = STATE / "etc" / "slurm.conf"
        text = file.read_text(encoding="utf-8")
        for name, value in values.items():
            text, count = re.subn(rf"(?m)^{name}=.*$", f"{name}={value}", text)
            assert count == 1
        file.write_text(text, encoding="utf-8")

    @property
    def has_cgroups(self) -> bool:
        """Whether Slurm tracks processes and limits memory by cgroups."""
        return (STATE / "etc" / "cgroups").exists()

    def preempt(self, run: str, *options: str) -> None:
        """Have a job with priority take a run's nodes for a moment; the run starts again after it."""
        nodes = f"--nodelist={','.join(self.nodes(self.job(run)))}"
        starts = self.count_starts(run)
        urgent = self.execute("sbatch", "--exclusive", nodes, *options, "--output=/dev/null", "--wrap=true")
        assert urgent.returncode == 0, urgent.stderr
        self.start_again(run, starts)

    @contextmanager
    def preemption_by_qos(self) -> Iterator[None]:
        """Let jobs of the QOS `urgent` preempt others, without grace time, and hide the accounting from the nodes."""
        nodes = sorted(path.stem for path in (STATE / "run").glob("n*.pid"))
        for node in nodes:
            self.switch("node", node, "--", "mount", "--bind", "/bin/false", "/usr/bin/sacct")
        self.switch("node", nodes[0], "--", "sacctmgr", "--immediate", "add", "qos", "urgent", "preempt=normal")
        self._preempt_by("qos")
        try:
            yield
        finally:
            self._preempt_by("partition_prio")
            self.switch("node", nodes[0], "--", "sacctmgr", "--immediate", "delete", "qos", "urgent")
            for node in nodes:
                self.switch("node", node, "--", "umount", "/usr/bin/sacct")

    def _preempt_by(self, plugin: str) -> None:
        """Restart the controller with another plugin, which it does not load while it runs."""
        self.switch("kill-controller")
        self._configure(PreemptType=f"preempt/{plugin}")
        self.switch("revive-controller")

    def declare_dead(self, node: str) -> None:
        """Mark a node as down without waiting minutes for Slurm to notice."""
        command = ("scontrol", "update", f"nodename={node}", "state=down", "reason=dead")
        subprocess.run([str(DEV_CLUSTER), "node", "n1", *command], check=True)

    def submit(self, name: str, *arguments: str) -> str:
        """Start a run on two nodes, one process each, without following it; return its id.

        Each process needs seven seconds of CPU to import torch and transformers, so tests use few processes.
        """
        size = ("--nodes", "2", "--processes-per-node", "1")
        done = self.ftkit("run", TINY, "--cluster", "dev", *size, "--name", name, "--no-follow", *arguments)
        return done.stdout.strip().splitlines()[-1].split()[-1]

    def submit_endless(self, name: str, *arguments: str) -> str:
        """Start a run with enough steps to leave time for disturbances; otherwise as `submit`."""
        return self.submit(name, *_ENDLESS, *arguments)

    def status(self, run: str) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.ftkit("status", run, "--json").stdout)
        return status

    def job(self, run: str) -> str:
        """Return the id of a run's newest job."""
        job: str = json.loads((self.folder(run) / "submission.json").read_text(encoding="utf-8"))["job_id"]
        return job

    def records(self, run: str, event: str) -> list[dict[str, Any]]:
        """Return the trainer's records, read from the file because calling ftkit takes longer than the training."""
        path = self.folder(run) / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.startswith(f'{{"event": "{event}"') and line.endswith("\n")]

    def wait_for_step(self, run: str, step: int, *, start: int = 0) -> int:
        """Wait until a run has completed a step in a given start; return its newest step."""

        def is_there() -> bool:
            starts = self.records(run, "start")
            return len(starts) > start and any(
                each["step"] >= step and each["time"] > starts[start]["time"] for each in self.records(run, "step")[-1:]
            )

        self._wait(run, is_there)
        newest: int = self.records(run, "step")[-1]["step"]
        return newest

    def slurm_state(self, job: str) -> str:
        """Return the job state from squeue; empty once Slurm has forgotten the job."""
        return self.execute("squeue", "--noheader", "--states=all", "--format=%T", "--jobs", job).stdout.strip()

    def count_starts(self, run: str) -> int:
        """Return how often Slurm has started a run's job script."""
        return (self.folder(run) / "logs" / "job.log").read_text(encoding="utf-8").count("ftkit: job ")

    def start_again(self, run: str, starts: int) -> None:
        """Wait until a job that had been started `starts` times is requeued, and start it without Slurm's delay.

        A job that has started again already is not waited for.
        """
        job = self.job(run)

        def has_started() -> bool:
            return self.count_starts(run) > starts

        self._wait(run, lambda: has_started() or self.slurm_state(job) == "PENDING")
        # slurmd rejects a job's new credential within the second in which it revoked the previous one.
        soon = ("scontrol", "update", f"jobid={job}", "StartTime=now+3")
        self._wait(run, lambda: has_started() or self.execute(*soon).returncode == 0)
        self._wait(run, lambda: self.slurm_state(job) == "RUNNING")

    def _wait(self, run: str, condition: Callable[[], bool], *, ends: bool = False) -> None:
        """Wait for a condition; unless it is the run's end, the job must still exist."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.explain(run)
            if not ends and (self.folder(run) / f"exit-code-{self.job(run)}").exists():
                assert self.slurm_state(self.job(run)) in _ACTIVE, self.explain(run)
            time.sleep(0.5)

    def wait_for_log(self, run: str, text: str) -> str:
        """Wait until the job's log contains a text; return the log."""
        path = self.folder(run) / "logs" / "job.log"
        self._wait(run, lambda: path.exists() and text in path.read_text(encoding="utf-8"))
        return path.read_text(encoding="utf-8")

    def wait_for_end(self, run: str) -> dict[str, Any]:
        """Wait until a run's job has ended; return the run's status."""
        self._wait(run, lambda: self.slurm_state(self.job(run)) not in _ACTIVE, ends=True)
        status = self.status(run)
        assert status["is_final"], self.explain(run)
        return status

    def wait_for_completion(self, run: str) -> dict[str, Any]:
        status = self.wait_for_end(run)
        assert status["state"] == "completed", self.explain(run)
        return status

    def explain(self, run: str) -> str:
        return f"{self.execute('ftkit', 'status', run).stdout}\n{self.execute('ftkit', 'logs', run).stdout}"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    for options in (["--cgroups"], []):  # as most sites, where this machine has what that needs
        command = [str(DEV_CLUSTER), "up", "--nodes", "5", *options]
        up = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        if up.returncode != SKIPPED:
            break
    if up.returncode == SKIPPED:
        pytest.skip(up.stderr.strip())
    assert up.returncode == 0, up.stdout + up.stderr
    yield Cluster()
    subprocess.run([str(DEV_CLUSTER), "down"], check=True, capture_output=True, timeout=PATIENCE_SECONDS)


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that is shared by all machines and readable by everyone; /tmp is per machine."""
    with tempfile.TemporaryDirectory(prefix=".weights-", dir=CHECKOUT) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
