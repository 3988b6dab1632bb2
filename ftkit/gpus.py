"""What ftkit knows of GPUs: for memory plans, step times and MFU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftkit.specs.cluster import GpuModel


USABLE_MEMORY = 0.95
"""Part of the memory that tensors can take; CUDA's context, NCCL and gaps between tensors have the rest."""


@dataclass(frozen=True)
class Gpu:
    """A GPU's numbers, from its vendor's data sheet; the memory as nvidia-smi shows it, where that was seen.

    Attributes:
        device_name: what torch calls it. Variants of other speed (PCIe, NVL) have other names, and are unknown.
        memory_gib: GiB.
        peak_flops: dense bf16 floating-point operations a second.
        memory_bandwidth: bytes a second.
        link_bandwidth: bytes a second to the other GPUs of its node, one way.
        has_fast_attention: whether flash-attn-4 runs on it (Hopper and newer).
    """

    device_name: str
    memory_gib: float
    peak_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    has_fast_attention: bool

    @property
    def usable_gib(self) -> float:
        """What tensors can take of the memory."""
        return USABLE_MEMORY * self.memory_gib


GPUS: dict[GpuModel, Gpu] = {
    "a100-40gb": Gpu("NVIDIA A100-SXM4-40GB", 40.0, 312e12, 1.555e12, 300e9, has_fast_attention=False),
    "a100-80gb": Gpu("NVIDIA A100-SXM4-80GB", 80.0, 312e12, 2.039e12, 300e9, has_fast_attention=False),
    "b200": Gpu("NVIDIA B200", 178.0, 2250e12, 8.0e12, 900e9, has_fast_attention=True),
    "h100-80gb": Gpu("NVIDIA H100 80GB HBM3", 79.6, 989e12, 3.35e12, 450e9, has_fast_attention=True),
    "h200": Gpu("NVIDIA H200", 140.4, 989e12, 4.8e12, 450e9, has_fast_attention=True),
    "l4": Gpu("NVIDIA L4", 22.5, 121e12, 0.3e12, 16e9, has_fast_attention=False),
}


def gpu_of_device(device_name: str) -> Gpu | None:
    """Return the GPU that torch calls so; None if its numbers are not known."""
    return next((gpu for gpu in GPUS.values() if gpu.device_name == device_name), None)
