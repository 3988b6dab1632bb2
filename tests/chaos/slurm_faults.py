"""Faults of Slurm's controller, of its daemons and of nodes, which end after some seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from chaos.faults import kill, kill_rank
from chaos.runs import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    from chaos.cluster import SlurmRun

_GARBAGE = """
import os, socket
server = socket.create_server(("", 6817))
while True:
    client, _ = server.accept()
    client.recv(100)
    client.sendall(os.urandom(64))
    client.close()
"""


def signal_rank(number: int, run: SlurmRun, chance: Random) -> None:
    """Send a signal to a rank at random."""
    ranks = wait_for(run, run.ranks)
    os.kill(ranks[chance.choice(sorted(ranks))], number)


def pause_rank(run: SlurmRun, chance: Random) -> None:
    """Stop a rank for five seconds."""
    ranks = wait_for(run, run.ranks)
    pid = ranks[chance.choice(sorted(ranks))]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    os.kill(pid, signal.SIGCONT)


def starve_rank(run: SlurmRun, chance: Random) -> None:
    """Put a rank into a cgroup (v1) with less memory than it needs, until the kernel kills it."""
    group = Path("/sys/fs/cgroup/memory/ftkit-chaos")
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(2**20))
    ranks = wait_for(run, run.ranks)
    pid = ranks[chance.choice(sorted(ranks))]
    (group / "cgroup.procs").write_text(str(pid))
    wait_for(run, lambda: not Path(f"/proc/{pid}").exists() or not (group / "cgroup.procs").read_text())
    group.rmdir()


def kill_stepd(run: SlurmRun, chance: Random) -> None:
    """Kill the slurmstepd of a node that has the ranks' step."""
    node = chance.choice(wait_for(run, run.nodes))
    pattern = rf"slurmstepd: \[{run.job}\.[0-9]+\]"
    run.cluster.call("node", node, "--", "pkill", "-KILL", "-f", pattern, check=False)


# --- The controller ------------------------------------------------------------------------------


@contextmanager
def controller_is(how: str, run: SlurmRun) -> Iterator[None]:
    """Kill or stop slurmctld, or have something else answer on its port, within the context."""
    state = run.cluster.state
    pattern = f"^slurmctld -D (-i )?-f {state}/etc/slurm.conf$"
    if how == "stopped":
        subprocess.run(["pkill", "-STOP", "-f", pattern], check=True)
        try:
            yield
        finally:
            subprocess.run(["pkill", "-CONT", "-f", pattern], check=True)
        return
    run.cluster.call("kill-controller")
    garbage = None
    if how == "garbage":
        network = f"--net=/proc/{(state / 'run' / 'controller.pid').read_text().strip()}/ns/net"
        garbage = subprocess.Popen(["nsenter", network, "--", "python3", "-c", _GARBAGE], stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        if garbage:
            garbage.kill()
            garbage.wait()
        run.cluster.call("revive-controller")


def lose_controller(
    how: str, action: Callable[[SlurmRun, Random], object] | None, run: SlurmRun, chance: Random
) -> None:
    """Let the controller not answer; then inject another fault, and wait until the job waits for the controller."""
    log = run.folder / "logs" / "job.log"
    before = len(log.read_text(errors="replace"))
    with controller_is(how, run):
        if action is None:
            time.sleep(15)
        else:
            action(run, chance)
            wait_for(run, lambda: "waiting for Slurm's controller" in log.read_text(errors="replace")[before:])


# --- Jobs and nodes ------------------------------------------------------------------------------


def preempt(run: SlurmRun, _: Random) -> None:
    """Let a job with priority take the nodes for a moment."""
    nodes = f"--nodelist={','.join(wait_for(run, run.nodes))}"
    urgent = ("--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=true")
    run.cluster.slurm("sbatch", "--wait", nodes, *urgent)


def drain(run: SlurmRun, chance: Random) -> None:
    """Drain a node for five seconds."""
    node = chance.choice(wait_for(run, run.nodes))
    scontrol = ("node", node, "--", "scontrol", "update", f"nodename={node}")
    run.cluster.call(*scontrol, "state=drain", "reason=chaos")
    time.sleep(5)
    run.cluster.call(*scontrol, "state=resume")


def suspend(run: SlurmRun, _: Random) -> None:
    """Suspend the job for five seconds."""
    node = wait_for(run, run.nodes)[0]
    run.cluster.call("node", node, "--", "scontrol", "suspend", run.job)
    time.sleep(5)
    run.cluster.call("node", node, "--", "scontrol", "resume", run.job)


def cut_network(seconds: float, run: SlurmRun, _: Random) -> None:
    """Take down the network of a node without the job script; no connection is reset."""
    link = ("node", wait_for(run, run.nodes)[-1], "--", "ip", "link", "set", "eth0")
    run.cluster.call(*link, "down")
    time.sleep(seconds)
    run.cluster.call(*link, "up")


SLURM_FAULTS: dict[str, Callable[[SlurmRun, Random], object]] = {
    **{
        f"{signal.Signals(number).name} of a rank": partial(signal_rank, number)
        for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGTERM)
    },
    "SIGSTOP of a rank for 5 s": pause_rank,
    "OOM kill of a rank by its cgroup": starve_rank,
    "kill -9 of srun": lambda run, _: kill(wait_for(run, run.sruns)),
    "kill -9 of slurmstepd": kill_stepd,
    "controller down for 15 s": partial(lose_controller, "down", None),
    "controller down, kill -9 of a rank": partial(lose_controller, "down", kill_rank),
    "controller stopped, kill -9 of a rank": partial(lose_controller, "stopped", kill_rank),
    "garbage from the controller, kill -9 of a rank": partial(lose_controller, "garbage", kill_rank),
    "scontrol reconfigure": lambda run, _: run.cluster.call("node", run.nodes()[0], "--", "scontrol", "reconfigure"),
    "preemption": preempt,
    "node drained for 5 s": drain,
    "job suspended for 5 s": suspend,
    "scancel --signal=TERM": lambda run, _: run.cluster.slurm("scancel", "--signal=TERM", run.job),
    "network of a node down for 3 s": partial(cut_network, 3),
    "network of a node down for 40 s": partial(cut_network, 40),
}
