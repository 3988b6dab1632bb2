"""Bind a rank to the CPUs of its GPU's NUMA node, and count its share of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.process import num_usable_cpus

if TYPE_CHECKING:
    from collections.abc import Sequence


def bind_to_gpu(bus_ids: Sequence[str], local_rank: int, root: Path = Path("/")) -> int:
    """Bind this process to the CPUs of its GPU's NUMA node; return its share of them, as a number of threads.

    Memory that it allocates afterwards is on that NUMA node too, which matters for pinned copies to the GPU. CPUs that
    Slurm or a container excludes stay excluded. If the topology can't be read, the process is not bound.

    Args:
        bus_ids: PCI addresses of the GPUs of all ranks on this node, by local rank.
        local_rank: of this process.
        root: the folder that contains /sys.
    """
    nodes = [_numa_node(bus_id, root) for bus_id in bus_ids]
    allowed = os.sched_getaffinity(0)
    near = allowed & _cpus_of_node(nodes[local_rank], root)
    if not near:
        return max(1, num_usable_cpus() // len(bus_ids))
    os.sched_setaffinity(0, near)
    num_sharing = sum(node == nodes[local_rank] for node in nodes)
    return max(1, len(near) // num_sharing)


def _numa_node(bus_id: str, root: Path) -> int:
    """Return the NUMA node of a PCI device; -1 (the kernel's value) for none."""
    try:
        return int((root / "sys/bus/pci/devices" / bus_id.lower() / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1


def _cpus_of_node(node: int, root: Path) -> set[int]:
    path = root / f"sys/devices/system/node/node{node}/cpulist"
    try:
        return parse_cpu_list(path.read_text(encoding="ascii")) if node >= 0 else set()
    except (OSError, ValueError):
        return set()


def parse_cpu_list(text: str) -> set[int]:
    """Parse the kernel's list format: `0-3,8,10-11`.

    Raises:
        ValueError: it is not such a list.
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
