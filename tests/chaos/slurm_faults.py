"""Faults of Slurm's controller, of its daemons and of nodes, which end after some seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
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

_GLUTTON = """
import os, sys, time
with open(f"{sys.argv[1]}/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
taken = bytearray(b"1") * 2**26
time.sleep(3600)
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
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def starve_rank(run: SlurmRun, chance: Random) -> None:
    """Fill the memory cgroup (v1) of a rank, Slurm's or a new one, until the kernel kills the rank."""
    ranks = wait_for(run, run.ranks)
    pid = ranks[chance.choice(sorted(ranks))]
    groups = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    own = next(line.partition(":memory:/")[2] for line in groups if ":memory:" in line)
    group = Path("/sys/fs/cgroup/memory", own if "/slurm" in own else f"ftkit-chaos-{pid}")
    group.mkdir(exist_ok=True)
    if "/slurm" not in own:
        (group / "cgroup.procs").write_text(str(pid))
    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")  # of the group's processes, the kernel kills this one
    used = int((group / "memory.usage_in_bytes").read_text())
    (group / "memory.limit_in_bytes").write_text(str(used + 2**24))
    with subprocess.Popen(["python3", "-c", _GLUTTON, str(group)]) as glutton:
        wait_for(run, lambda: not Path(f"/proc/{pid}").exists())
        glutton.kill()
    if "/slurm" not in own:
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
    job = run.cluster.slurm("sbatch", "--parsable", nodes, *urgent, check=True).strip()
    state = ("squeue", "--noheader", "--states=all", "--format=%T", "--jobs", job)
    wait_for(run, lambda: run.is_over() or run.cluster.slurm(*state).strip() == "COMPLETED")


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


def cut_network(which: int, seconds: float, run: SlurmRun, _: Random) -> None:
    """Take down the network of a node; no connection is reset. The first one has the job script and rank 0."""
    link = ("node", wait_for(run, run.nodes)[which], "--", "ip", "link", "set", "eth0")
    run.cluster.call(*link, "down")
    time.sleep(seconds)
    run.cluster.call(*link, "up")


SLURM_FAULTS: dict[str, Callable[[SlurmRun, Random], object]] = {
    **{
        f"{signal.Signals(number).name} of a rank": partial(signal_rank, number)
        for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGTERM)
    },
    "SIGSTOP of a rank for 5 s": pause_rank,
    "SIGSTOP of a rank": partial(signal_rank, signal.SIGSTOP),
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
    "network of a node down for 3 s": partial(cut_network, -1, 3),
    "network of a node down for 40 s": partial(cut_network, -1, 40),
    "network of the first node down for 3 s": partial(cut_network, 0, 3),
    "network of the first node down for 40 s": partial(cut_network, 0, 40),
}
