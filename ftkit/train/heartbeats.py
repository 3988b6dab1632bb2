"""Heartbeats between the nodes of a run: when a node stops sending, the launchers on the others end their ranks.

A node that loses power or its network does not reset its connections. gloo and NCCL would wait until their timeouts,
and Slurm until SlurmdTimeout. So each launcher sends a UDP packet per second to every other one, and records in the
run's folder which node went silent. The job script replaces that node.

If only the launcher has ended, its node's kernel refuses packets: the node is alive, and srun ends the other tasks.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout

NODES = "FTKIT_NODES"
"""Environment variable with a token unique to this start of training, then the nodes of its tasks in rank order."""
BEAT_SECONDS = 1.0
SILENT_SECONDS = 15.0
"""Seconds without a packet after which a node counts as silent: hypervisors and switches can pause for several."""
_STALLED_SECONDS = 3.0  # a longer gap between two beats means that this process was suspended and read no packets
_SETTLED_SECONDS = 3.0  # a node that shuts down refuses packets until its network is down
_WRITE_SECONDS = 5.0  # timeout of writing to the run's folder: the silent node may be its file server


class Heartbeats:
    """The heartbeats of the launcher of node `rank`.

    A thread calls `on_silence` with the silent nodes, the time of each one's last packet since the epoch, and whether
    this node itself has lost its network.

    A node can go silent only after its first packet: containers start at different times.
    """

    def __init__(
        self, words: Sequence[str], rank: int, port: int, on_silence: Callable[[dict[str, float], bool], None]
    ) -> None:
        self._start, *self.nodes = words
        self._on_silence = on_silence
        self._packet = f"ftkit {self._start} {rank}".encode()
        self._heard: dict[int, float] = {}
        self._inbox = _listen(port)
        self._outboxes = {
            peer: box
            for peer, node in enumerate(self.nodes)
            if peer != rank and (box := _connect(node, port, self._inbox.family))
        }

    def start(self) -> None:
        threading.Thread(target=self._keep_beating, name="heartbeats", daemon=True).start()

    def settle(self) -> None:
        """Wait for a few more seconds of heartbeats from each node, or until `on_silence` ends this process."""
        settled = time.monotonic() + _SETTLED_SECONDS
        while any(heard < settled for heard in list(self._heard.values())):
            time.sleep(BEAT_SECONDS / 10)

    def _keep_beating(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(BEAT_SECONDS)
            now = time.monotonic()
            if now - last > _STALLED_SECONDS:
                self._heard = dict.fromkeys(self._heard, now)
            last, is_cut_off = now, False
            for peer, box in self._outboxes.items():
                try:
                    box.send(self._packet)
                except ConnectionRefusedError:
                    self._heard[peer] = now
                except OSError as error:  # unreachable, or the queue is full
                    is_cut_off |= error.errno in {errno.ENETDOWN, errno.ENETUNREACH}  # this node's own link
            self._receive(now)
            if silent := {peer: now - heard for peer, heard in self._heard.items() if now - heard > SILENT_SECONDS}:
                # A node that hears less than half of the nodes has lost its own network.
                is_cut_off |= len(silent) > len(self.nodes) / 2
                began = time.time()
                self._on_silence({self.nodes[peer]: began - seconds for peer, seconds in silent.items()}, is_cut_off)
                return

    def _receive(self, now: float) -> None:
        with suppress(BlockingIOError):
            while True:
                match self._inbox.recv(256).decode(errors="replace").split():
                    case ["ftkit", self._start, peer] if peer.isdecimal() and int(peer) in self._outboxes:
                        self._heard[int(peer)] = now


def _listen(port: int) -> socket.socket:
    """Return a socket that receives at a port: dual-stack IPv6 if the machine supports it, else IPv4."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    inbox = socket.socket(family, socket.SOCK_DGRAM)
    if family == socket.AF_INET6:
        inbox.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    inbox.bind(("", port))
    inbox.setblocking(False)  # noqa: FBT003
    return inbox


def _connect(node: str, port: int, family: int) -> socket.socket | None:
    """Return a socket that sends to a node; None if its name has no address."""
    with suppress(OSError):
        found = socket.getaddrinfo(node, port, type=socket.SOCK_DGRAM)
        usable = [each for each in found if each[0] in (family, socket.AF_INET)]
        box = socket.socket(usable[0][0], socket.SOCK_DGRAM)
        box.setblocking(False)  # noqa: FBT003
        box.connect(usable[0][4])
        return box
    return None


def watch_nodes(layout: RunLayout, rank: int, port: int) -> Heartbeats | None:
    """Send heartbeats until this process ends, and end it with its ranks if another node goes silent.

    Returns None if there is no other node.
    """
    words = os.environ.get(NODES, "").split()

    def end(silent: dict[str, float], is_cut_off: bool) -> None:  # noqa: FBT001
        told = ", ".join(
            f"{node} since {datetime.fromtimestamp(since, UTC):%H:%M:%S} UTC" for node, since in silent.items()
        )

        def write() -> None:
            for node, since in {} if is_cut_off else silent.items():
                with suppress(OSError):
                    layout.silent_nodes.mkdir(exist_ok=True)
                    (layout.silent_nodes / node).write_text(f"{since:.0f}\t{words[1 + rank]}\n", encoding="utf-8")
            sys.stderr.write(f"ftkit: {words[1 + rank]} hears nothing from {told}: ending its processes\n")

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(_WRITE_SECONDS)
        os._exit(1)  # the kernel kills the ranks with their parent

    if len(words) > 2:  # noqa: PLR2004 - a token and two nodes
        try:
            beats = Heartbeats(words, rank, port, end)
        except OSError as error:
            sys.stderr.write(f"ftkit: no heartbeats: UDP port {port}: {error.strerror}\n")
        else:
            beats.start()
            return beats
    return None
