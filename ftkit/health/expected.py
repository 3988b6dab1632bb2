"""Expected performance of GPUs and networks, and thresholds for faults.

Peaks are from the vendors' data sheets (`GPUS`). The fractions are what large matmuls and NCCL's
collectives reach on healthy nodes, minus a margin: cuBLAS reaches 65 to 75% of the dense bf16 peak of an H100 or H200
with matrices of 8,192 x 8,192, and half of an L4's, because of its 72 W limit. nccl-tests' all-reduce reaches 75% or
more of NVLink's one-way bandwidth between the GPUs of a node, and of the network's bandwidth between nodes.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Final

from ftkit.planning.training_setup import GPUS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftkit.config.cluster import GpuModel

_MATMUL_SHARE: Final = 0.5
_MATMUL_SHARES: Final[dict[str, float]] = {"l4": 0.3}
_MEMORY_SHARE: Final = 0.7
_LINK_SHARE: Final = 0.5
_NETWORK_SHARE: Final = 0.5
OUTLIER: Final = {"cuda": 0.85, "cpu": 0.1}
"""Fraction of the median of all devices below which a device is an outlier. CPUs are shared with other processes."""


def least_matmul(gpu: GpuModel | None) -> float | None:
    """Return the minimum TFLOP/s of bf16 matmuls on a healthy GPU; None for an unknown one."""
    return None if gpu is None else _MATMUL_SHARES.get(gpu, _MATMUL_SHARE) * GPUS[gpu].bf16_flops / 1e12


def least_memory_bandwidth(gpu: GpuModel | None) -> float | None:
    """Return the minimum GB/s that a copy within a healthy GPU's memory reads and writes."""
    return None if gpu is None else _MEMORY_SHARE * GPUS[gpu].memory_bandwidth / 1e9


def least_link_bandwidth(gpu: GpuModel | None) -> float | None:
    """Return the minimum bus bandwidth in GB/s of collectives within a node."""
    return None if gpu is None else _LINK_SHARE * GPUS[gpu].link_bandwidth / 1e9


def least_network_bandwidth(network_gbps: float | None) -> float | None:
    """Return the minimum bus bandwidth in GB/s of collectives between nodes, from their network's Gbit/s."""
    return None if network_gbps is None else _NETWORK_SHARE * network_gbps / 8


def all_reduce_bus_bandwidth(num_bytes: int, num_ranks: int, seconds: float) -> float:
    """Return nccl-tests' bus bandwidth in GB/s: S/t x 2(n-1)/n, with S bytes on each rank (its doc/PERFORMANCE.md)."""
    return num_bytes / seconds * 2 * (num_ranks - 1) / num_ranks / 1e9


def all_gather_bus_bandwidth(num_bytes: int, num_ranks: int, seconds: float) -> float:
    """Return nccl-tests' bus bandwidth in GB/s: S/t x (n-1)/n, with S bytes gathered on each rank."""
    return num_bytes / seconds * (num_ranks - 1) / num_ranks / 1e9


def is_outlier(value: float, others: Sequence[float], device: str) -> bool:
    """Return whether a measured rate is far below the median of all rates (of two rates: below the other)."""
    return (len(others) > 1 and value < OUTLIER[device] * median(others)) or (
        len(others) == 2 and value < OUTLIER[device] * max(others)  # noqa: PLR2004 - the median is between them
    )
