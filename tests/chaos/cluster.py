"""Runs on the real Slurm of scripts/dev-cluster, and faults of its nodes, daemons and jobs; as root."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from chaos.campaign import RESIZED
from chaos.faults import FAULTS, kill
from chaos.runs import Run, wait_for
from chaos.slurm_faults import SLURM_FAULTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_STATE = Path(os.environ.get("FTKIT_DEV_CLUSTER_DIR", "/var/lib/ftkit-dev-cluster"))
DEFAULT_USER = os.environ.get("FTKIT_DEV_CLUSTER_USER", "ftkit-dev")
WORKSPACE_MIB = 128
OPTIONS = (
    "training.global_batch_size=12", "training.micro_batch_size=1", "training.sequence_length=128",
    "training.learning_rate=1e-3", "training.checkpoint_every_steps=8", "training.log_every_steps=1",
    "training.precision=fp32", "training.max_failed_checkpoints=1000", "evaluation.generation=null",
    "resources.max_restarts=1000", "resources.hang_timeout_seconds=45",
)  # fmt: skip
SIZES = ((1, 1), (2, 1), (3, 1), (2, 2))
"""Number of nodes, and processes per node."""
MOST_NODES = max(nodes for nodes, _ in SIZES)
ACTIVE = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED"}


@dataclass(frozen=True)
class DevCluster:
    """A cluster of scripts/dev-cluster, given by its state folder and its user."""

    state: Path = DEFAULT_STATE
    user: str = DEFAULT_USER

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def workspace(self) -> Path:
        """A file system of limited size, shared by all machines."""
        return self.state / "shared" / "chaos"

    def call(self, *arguments: str, check: bool = True) -> str:
        """Call scripts/dev-cluster; return what it printed."""
        environment = os.environ | {
            "FTKIT_DEV_CLUSTER_DIR": str(self.state),
            "FTKIT_DEV_CLUSTER_USER": self.user,
            "FTKIT_WORKSPACE": str(self.workspace),
            "FTKIT_REPORT": "0",  # matplotlib, at the end of each run
        }
        command = [str(ROOT / "scripts" / "dev-cluster"), *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    def slurm(self, *command: str, check: bool = False) -> str:
        """Run a command on the login node."""
        return self.call("exec", "--", *command, check=check)

    def nodes_in(self, state: str) -> list[str]:
        """Return the nodes in a state."""
        command = ("sinfo", "--noheader", "--Node", "--partition=dev", f"--states={state}", "--format=%N")
        return self.slurm(*command).split()

    def resume_nodes(self) -> None:
        """Let nodes take jobs again that Slurm has drained."""
        for node in self.nodes_in("drain"):
            self.call("node", node, "--", "scontrol", "update", f"nodename={node}", "state=resume", check=False)

    def ftkit(self, *arguments: str) -> str:
        """Run ftkit on the login node."""
        return self.slurm(str(ROOT / ".venv" / "bin" / "ftkit"), *arguments, check=True)

    def mount_workspace(self, machine: str | None = None) -> None:
        """Mount the workspace on the host and in the machines, whose namespaces do not see later mounts of the host."""
        if machine is None:
            self.workspace.mkdir(parents=True, exist_ok=True)
            options = f"size={WORKSPACE_MIB}m,mode=1777"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "chaos", str(self.workspace)], check=True)
        machines = [machine] if machine else [path.stem for path in (self.state / "run").glob("*.pid")]
        libc = ctypes.CDLL(None, use_errno=True)
        for name in machines:
            if (child := os.fork()) == 0:
                # open_tree(AT_FDCWD, …, OPEN_TREE_CLONE)
                tree = libc.syscall(428, -100, os.fsencode(self.workspace), 1)
                pid = (self.state / "run" / f"{name}.pid").read_text().strip()
                is_in = libc.setns(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY), 0) == 0
                # move_mount(…, MOVE_MOUNT_F_EMPTY_PATH)
                moved = libc.syscall(429, tree, b"", -100, os.fsencode(self.workspace), 4)
                os._exit(0 if is_in and moved == 0 else 1)
            if os.waitpid(child, 0)[1]:
                raise OSError(f"the workspace can't be mounted into {name}")

    def unmount_workspace(self) -> None:
        """Unmount the workspace on the host; the machines keep theirs until they end."""
        subprocess.run(["umount", "--lazy", str(self.workspace)], check=False, capture_output=True)


# --- Runs ----------------------------------------------------------------------------------------


@dataclass
class SlurmRun(Run):
    """A run on a cluster."""

    poll_seconds: ClassVar[float] = 0.3  # most of the CPU is for the ranks
    cluster: DevCluster
    _asked: float = float("-inf")
    _asked_job: str = ""
    _is_over: bool = False

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def job(self) -> str:
        """Id of its newest job."""
        job: str = json.loads((self.folder / "submission.json").read_text())["job_id"]
        return job

    def is_over(self) -> bool:
        """Ask Slurm at most every two seconds for each job."""
        job = self.job
        if job != self._asked_job or time.monotonic() > self._asked + 2:
            self._is_over = self._ask(job)
            self._asked, self._asked_job = time.monotonic(), job
        return self._is_over

    def _ask(self, job: str) -> bool:
        # Of all jobs: only then is an empty answer that of Slurm, and not of a controller that is too busy.
        fields = "--Format=JobID: ,State: ,Reason:100"
        try:
            rows = self.cluster.slurm("squeue", "--noheader", "--states=all", fields, check=True).splitlines()
        except RuntimeError:
            return False
        answer = next((row.split()[1:] for row in rows if row.split()[:1] == [job]), [])
        if "DRAINED" in answer:  # by Slurm, after a node that had no network came back with steps of the last start
            self.cluster.resume_nodes()
        if answer[-1:] == ["held"]:  # no job can prevent this: do what `ftkit status` says
            command = f"scontrol release {job}"
            if command not in " ".join(self.cluster.ftkit("status", self.id).split()):
                raise AssertionError(f"ftkit status does not say: {command}")
            self.cluster.resume_nodes()
            self.cluster.slurm(*command.split(), check=True)
            self.num_releases += 1
        return not answer or answer[0] not in ACTIVE

    def output(self) -> str:
        return (self.folder / "logs" / "job.log").read_text()[-1500:]

    def ranks(self) -> dict[str, int]:
        return self._processes("rank")

    def launchers(self) -> list[int]:
        return sorted(self._processes("launcher").values())

    def sruns(self) -> list[int]:
        return sorted(self._processes("srun").values())

    def nodes(self) -> list[str]:
        listed = self.cluster.slurm("squeue", "--noheader", "--jobs", self.job, "--format=%N").strip()
        return self.cluster.slurm("scontrol", "show", "hostnames", listed).split() if listed else []

    def _processes(self, kind: str) -> dict[str, int]:
        """Return this run's processes by rank, or its launchers or its srun by process id."""
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError, StopIteration):
                pid = int(entry.name)
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if str(self.folder / "plan.json").encode() not in words or b"bash" in words[0]:
                    continue
                if words[0].endswith(b"srun") != (kind == "srun"):
                    continue
                rank = ""
                if kind == "rank" and b"ftkit.train.launcher" not in words:
                    variables = (entry / "environ").read_bytes().split(b"\0")
                    rank = next(each[5:].decode() for each in variables if each.startswith(b"RANK="))
                if (kind == "rank") == bool(rank) and (kind == "srun" or b"ftkit.train.launcher" in words or rank):
                    found[rank or str(pid)] = pid
        return found


# --- The cluster ---------------------------------------------------------------------------------


@dataclass
class SlurmSite:
    """The cluster, with the workspace mounted within the context; each run has this many nodes and steps."""

    nodes: int
    steps: int
    cluster: DevCluster = field(default_factory=DevCluster)
    dead: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.cluster.unmount_workspace()
        self.cluster.mount_workspace()
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.unmount_workspace()

    def start(self, name: str) -> SlurmRun:
        size = ("--nodes", str(self.nodes), "--processes-per-node", "1")
        said = self.cluster.ftkit("run", str(ROOT / "tests/train/tiny.yaml"), "--cluster", "dev", *size, "--name", name,
                                  "--no-follow", *OPTIONS, f"training.max_steps={self.steps}")  # fmt: skip
        return SlurmRun(self.cluster.workspace / "runs" / said.split()[-1], self.steps, self.cluster)

    def resume(self, run: Run) -> None:
        self.cluster.ftkit("resume", run.folder.name, "--no-follow")

    def abandon(self, run: Run) -> Path:
        kept = Path(tempfile.mkdtemp(prefix=f"ftkit-chaos-{self.cluster.name}-"))
        subprocess.run(["cp", "-r", str(run.folder), str(self.cluster.state / "log"), str(kept)], check=False)
        asked = ("scontrol --all show job; scontrol show node; squeue --states=all --long; sinfo --Node --long; "
                 f"{ROOT}/.venv/bin/ftkit status {run.folder.name}")  # fmt: skip
        (kept / "slurm").write_text(self.cluster.slurm("bash", "-c", f"({asked}) 2>&1"))
        self.cluster.slurm("scancel", "--user", self.cluster.user)
        self.repair()
        return kept

    def repair(self) -> None:
        while self.dead:
            node = self.dead.pop()
            self.cluster.call("revive-node", node)
            self.cluster.mount_workspace(node)
        self.cluster.resume_nodes()
        for node in self.cluster.nodes_in("down"):
            if not self.cluster.call("node", node, "--", "pgrep", "-x", "slurmd", check=False):
                log = (self.cluster.state / "log" / f"slurmd-{node}.log").read_text(errors="replace")[-1500:]
                sys.stdout.write(f"{self.cluster.name}: slurmd of {node} does not run: started again. {log}\n")
                start_slurmd(self.cluster, node)

    @property
    def faults(self) -> dict[str, Callable[[SlurmRun, Random], object]]:
        return FAULTS | {
            "kill -9 of a launcher": lambda run, chance: kill([chance.choice(wait_for(run, run.launchers))]),
            "kill -9 of slurmd": kill_slurmd,
            "power cut of a node": self._kill_node,
            "scontrol requeue": lambda run, _: self.cluster.slurm("scontrol", "requeue", run.job),
            "time limit": lambda run, _: self.cluster.slurm("scancel", "--batch", "--signal=USR1", run.job),
            "scancel, ftkit resume": partial(self._cancel, changes_size=False),
            "disk full": fill_disk,
            **SLURM_FAULTS,
            RESIZED: partial(self._cancel, changes_size=True),
        }

    def _kill_node(self, run: SlurmRun, chance: Random) -> None:
        node = chance.choice(wait_for(run, run.nodes))
        self.cluster.call("kill-node", node)
        self.cluster.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=chaos")
        self.dead.append(node)

    def _cancel(self, run: SlurmRun, chance: Random, *, changes_size: bool) -> None:
        self.cluster.slurm("scancel", run.job)
        wait_for(run, run.is_over)
        nodes, processes = chance.choice(SIZES)
        size = ("--nodes", str(nodes), "--processes-per-node", str(processes)) if changes_size else ()
        self.cluster.ftkit("resume", run.id, *size, "--no-follow")


def kill_slurmd(run: SlurmRun, chance: Random) -> None:
    """Kill a node's slurmd, and start it again before or after Slurm notices (SlurmdTimeout is 10 s)."""
    node = chance.choice(wait_for(run, run.nodes))
    run.cluster.call("node", node, "--", "pkill", "-KILL", "-x", "slurmd", check=False)
    time.sleep(chance.choice([3, 25]))
    start_slurmd(run.cluster, node)


def start_slurmd(cluster: DevCluster, node: str) -> None:
    """Start a node's slurmd."""
    cluster.call("node", node, "--", "sh", "-c", "exec setsid --fork slurmd -D >/dev/null 2>&1")


def fill_disk(run: SlurmRun, chance: Random) -> None:
    """Fill the workspace for some steps."""
    ballast = run.cluster.workspace / "ballast"
    with suppress(OSError), ballast.open("wb") as file:
        while True:
            file.write(bytes(2**16))
    failed, step = len(run.records("failed_checkpoint")), run.step()
    time.sleep(run.seconds_for_steps(chance.randint(4, 12)))  # its records wait, too
    ballast.unlink()
    wait_for(run, lambda: len(run.records("failed_checkpoint")) > failed or run.step() > step + 8 or run.is_over())
