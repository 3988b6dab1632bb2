"""What this machine has, for profiles that say `device: auto`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from ftkit.config.cluster import GpuModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftkit.config.cluster import ClusterProfile


_ROOT = Path("/")


def detect_hardware(profile: ClusterProfile, environment: Mapping[str, str], root: Path = _ROOT) -> ClusterProfile:
    """Replace `device: auto` by what this machine has; `root` is where its /dev and /proc are."""
    if profile.device != "auto":
        return profile
    found: dict[str, object] = {"cpus_per_node": profile.cpus_per_node or len(os.sched_getaffinity(0))}
    num_gpus = _count_gpus(environment, root)
    if num_gpus:
        found |= {"device": "cuda", "gpus_per_node": num_gpus, "gpu": profile.gpu or _gpu_model(root)}
    else:
        found |= {"device": "cpu"}
    return profile.model_copy(update=found)


def host_memory_gib() -> float:
    """Return the main memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _count_gpus(environment: Mapping[str, str], root: Path) -> int:
    """Count the GPUs that CUDA will show to a process started here."""
    present = len(list(root.glob("dev/nvidia[0-9]*")))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    allowed = [device.strip() for device in visible.split(",")]
    stop = next((i for i, device in enumerate(allowed) if device in ("", "-1")), len(allowed))  # as CUDA reads it
    return min(present, stop)


def _gpu_model(root: Path) -> str | None:
    """Recognise the GPUs by the driver's files: the profile's word for "NVIDIA H100 80GB HBM3" is h100-80gb."""
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        words = set(re.findall(r"[a-z0-9]+", path.read_text(errors="replace").lower()))
        for model in get_args(GpuModel):
            if words.issuperset(model.split("-")):
                return str(model)
    return None
