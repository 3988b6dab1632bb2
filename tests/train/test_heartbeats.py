"""Launchers on nodes whose links are cut: network namespaces of this machine, which takes root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from waiting import wait_until

from ftkit.planning.layout import RunLayout
from ftkit.runs.ends import silent_nodes
from ftkit.train.heartbeats import NODES, SILENT_SECONDS

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces take root and iproute2"
)

RANK = """
import os, sys, time
from pathlib import Path
from ftkit.process import die_with_parent
die_with_parent(os.getppid())
Path(sys.argv[1]).touch()
time.sleep(3600)
"""
LAUNCHER = f"""
import subprocess, sys, time
from pathlib import Path
from ftkit.planning.layout import RunLayout
from ftkit.train.heartbeats import watch_nodes
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
subprocess.Popen([sys.executable, "-c", {RANK!r}, str(folder / f"rank-{{rank}}")], start_new_session=True)
beats = watch_nodes(RunLayout(folder), rank, 29123)
while not (folder / "failed").exists():
    time.sleep(0.1)
beats.settle()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Nodes:
    """Nodes on one bridge, with a launcher on each."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.names = [f"10.231.{os.getpid() % 250}.{each}" for each in range(1, number + 1)]
        self.spaces = [f"ftkit-{os.getpid()}-{each}" for each in range(number)]
        self.launchers: list[subprocess.Popen[bytes]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        with ExitStack() as stack:
            hub = f"ftkit-{os.getpid()}-hub"  # a bridge of the host could have a firewall
            ip("netns", "add", hub)
            stack.callback(ip, "netns", "delete", hub)
            ip("-n", hub, "link", "add", "br0", "up", "type", "bridge")
            for number, (space, address) in enumerate(zip(self.spaces, self.names, strict=True)):
                ip("netns", "add", space)
                stack.callback(ip, "netns", "delete", space)
                ip("-n", hub, "link", "add", f"to{number}", "up", "master", "br0", "type", "veth",
                   "peer", "name", "eth0", "netns", space)  # fmt: skip
                ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
                ip("-n", space, "link", "set", "eth0", "up")
                started = self._start(space, number)
                stack.callback(started.wait)
                stack.callback(started.kill)
                self.launchers.append(started)
            wait_until(lambda: len(list(self.folder.glob("rank-*"))) == len(self.names))
            time.sleep(3)  # for heartbeats of all
            yield

    def _start(self, space: str, number: int) -> subprocess.Popen[bytes]:
        command = ["ip", "netns", "exec", space, sys.executable, "-c", LAUNCHER, str(self.folder), str(number)]
        environment = {**os.environ, NODES: " ".join(["start", *self.names])}
        return subprocess.Popen(command, env=environment)

    def cut(self, number: int) -> None:
        ip("-n", self.spaces[number], "link", "set", "eth0", "down")

    def ended(self) -> list[int]:
        return [number for number, each in enumerate(self.launchers) if each.poll() is not None]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[[int], Nodes]]:
    with ExitStack() as stack:

        def start(number: int) -> Nodes:
            made = Nodes(tmp_path, number)
            stack.enter_context(made.running())
            return made

        yield start


@pytest.mark.parametrize(("victim", "is_shut_down"), [(0, False), (2, True)])
def test_a_node_whose_link_is_cut_is_named_and_all_processes_end(
    nodes: Callable[[int], Nodes], victim: int, *, is_shut_down: bool
) -> None:
    three, began = nodes(3), time.time()
    if is_shut_down:  # its processes end first, which resets the connections of the other ranks
        three.launchers[victim].kill()
        (three.folder / "failed").touch()
        time.sleep(1)
    three.cut(victim)
    wait_until(lambda: three.ended() == [0, 1, 2])
    ((name, (since, peer)),) = silent_nodes(RunLayout(three.folder)).items()
    assert name == three.names[victim]
    assert peer != name
    assert abs(since - began) < SILENT_SECONDS / 3
    ranks = ["pgrep", "-f", f"{three.folder}/rank-"]
    wait_until(lambda: subprocess.run(ranks, capture_output=True, check=False).returncode == 1)


def test_a_node_whose_launcher_is_killed_is_not_silent(nodes: Callable[[int], Nodes]) -> None:
    three = nodes(3)
    three.launchers[1].kill()
    time.sleep(SILENT_SECONDS + 3)
    assert three.ended() == [1]
    (three.folder / "failed").touch()
    wait_until(lambda: three.ended() == [0, 1, 2])
    assert silent_nodes(RunLayout(three.folder)) == {}
