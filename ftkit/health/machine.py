"""Checks of this node: its disks, its shared folder, its driver and the state of its GPUs."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ftkit import process
from ftkit.errors import FtkitError, one_line
from ftkit.health.findings import Finding
from ftkit.health.nvml import FAULTY_REASONS, Nvml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ftkit.health.nvml import GpuHealth

_MIB: Final = 2**20
_DCGM_SECONDS: Final = 40.0
_LEAST_FREE_GIB: Final = 2
"""Free space on the local disk for compiled kernels and temporary files of one run."""
_SLOW_MB: Final = {"local disk": 200, "shared disk": 50}
"""Minimum MB/s of one writer: at less, loading weights and writing checkpoints take hours."""


@dataclass(frozen=True)
class Expectation:
    """Expected properties of a node.

    Attributes:
        local_dir: folder on its own disk.
        shared_file: a file that the submitting machine wrote to the shared file system; None without one.
        num_gpus: number of GPUs; 0 for training on CPUs.
        device_name: the driver's name for the GPUs; empty if unknown.
    """

    local_dir: Path
    shared_file: Path | None
    num_gpus: int
    device_name: str


def check_machine(
    expected: Expectation, nvml: Nvml | str, environment: Mapping[str, str], mib: int, *, is_short: bool = False
) -> list[Finding]:
    """Check this node.

    Args:
        expected: its expected properties.
        nvml: its GPUs, or why NVML is unavailable.
        environment: environment of the container.
        mib: amount to write to each disk, in MiB.
        is_short: skip NVIDIA's diagnostics, which take about ten seconds.
    """
    findings = [_check_disk("local disk", expected.local_dir, mib)]
    if expected.shared_file is not None:
        findings.append(_check_shared(expected.shared_file, mib))
    if isinstance(nvml, str):
        if expected.num_gpus:
            findings.append(Finding("driver", "unknown", nvml))
        return findings
    findings += _check_driver(nvml, environment)
    findings += _check_gpus(nvml.health(), expected)
    return findings if is_short else findings + _check_dcgm()


# --- Disks ---------------------------------------------------------------------------------------


def _check_shared(marker: Path, mib: int) -> Finding:
    if not marker.is_file():
        fix = "mount the file system on this node, or set 'workspace:' to one that all nodes have"
        return Finding(
            "shared disk", "failed", f"{marker.parent} is not the same folder as on the submitting machine", fix
        )
    return _check_disk("shared disk", marker.parent, mib)


def _check_disk(name: str, folder: Path, mib: int) -> Finding:
    """Write a file, sync it, and remove it."""
    path = folder / f".ftkit-doctor-{secrets.token_hex(4)}"
    block = os.urandom(_MIB)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free_gib = shutil.disk_usage(folder).free / 2**30
        start = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(mib):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        speed = mib * _MIB / (time.perf_counter() - start) / 1e6
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "free up space" if is_full else "mount it, or set another folder in the profile"
        return Finding(name, "failed", f"{folder}: {one_line(error)}", fix)
    finally:
        path.unlink(missing_ok=True)
    value = f"{folder}: {speed:,.0f} MB/s, {free_gib:,.0f} GiB free"
    if name == "local disk" and free_gib < _LEAST_FREE_GIB:
        return Finding(name, "failed", f"{folder}: {free_gib:.1f} GiB free", "free up space")
    if speed < _SLOW_MB[name]:
        return Finding(name, "warning", f"{value}: slow", "check whether other jobs write to it")
    return Finding(name, "ok", value)


# --- The driver and its GPUs ---------------------------------------------------------------------


def _check_driver(nvml: Nvml, environment: Mapping[str, str]) -> list[Finding]:
    """Compare the driver with the image's CUDA: minor versions of the same major version are compatible."""
    needed = image_cuda(environment)
    value = f"{nvml.driver}" + (f", CUDA {nvml.cuda[0]}.{nvml.cuda[1]}" if nvml.cuda else "")
    if nvml.cuda and needed and nvml.cuda[0] < needed[0]:
        fix = f"install a driver for CUDA {needed[0]}, or use an image with CUDA {nvml.cuda[0]}"
        return [Finding("driver", "failed", f"{value}; the image has CUDA {needed[0]}.{needed[1]}", fix)]
    return [Finding("driver", "ok", value)]


def image_cuda(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return this container's CUDA version: CUDA_VERSION, which NVIDIA's images set, else that of the torch package."""
    text = environment.get("CUDA_VERSION", "")
    if not text:
        try:
            from torch.version import cuda  # noqa: PLC0415
        except ImportError:
            return None
        text = cuda or ""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def _check_gpus(gpus: list[GpuHealth], expected: Expectation) -> list[Finding]:
    names = ", ".join(sorted({gpu.name for gpu in gpus})) or "none"
    value = f"{len(gpus)} x {names}"
    if len(gpus) < expected.num_gpus:
        fix = "check the kernel log for Xid errors, and reboot the node"
        return [Finding("GPUs", "failed", f"{value}; {expected.num_gpus} expected", fix)]
    is_other = bool(expected.device_name) and any(expected.device_name not in gpu.name for gpu in gpus)
    fix = "set 'gpu:' in the cluster's profile" if is_other else ""
    shown = f"{value}; the profile says {expected.device_name}" if is_other else value
    return [
        Finding("GPUs", "warning" if is_other else "ok", shown, fix),
        *(finding for gpu in gpus for finding in check_gpu(gpu, has_peers=len(gpus) > 1)),
    ]


def _check_dcgm() -> list[Finding]:
    """Run the short diagnostics of NVIDIA's DCGM if the program is installed and permitted."""
    program = shutil.which("dcgmi")
    if program is None:
        return []
    try:
        done = process.run([program, "diag", "-r", "1"], timeout_seconds=_DCGM_SECONDS)
    except FtkitError as error:
        return [Finding("DCGM", "unknown", error.what)]
    failed = re.findall(r"\|\s*([^|]+?)\s*\|\s*Fail", done.stdout)
    if failed:
        return [Finding("DCGM", "failed", ", ".join(failed), "run 'dcgmi diag -r 1' on that node")]
    if done.returncode != 0:
        return [Finding("DCGM", "unknown", one_line(done.stderr or done.stdout))]
    return [Finding("DCGM", "ok", "diagnostics of level 1 pass")]


def check_gpu(gpu: GpuHealth, *, has_peers: bool) -> Iterator[Finding]:
    """Yield the faults of a GPU; without peers, inactive links are normal (a single GPU in a virtual machine)."""
    index = gpu.index
    if gpu.uncorrected_errors:
        yield Finding("ECC", "failed", f"{gpu.uncorrected_errors} uncorrected errors", "reset the GPU or reboot", index)
    if gpu.is_remap_failed:
        yield Finding("row remap", "failed", "a memory row could not be replaced", "have the GPU replaced", index)
    elif gpu.is_remap_pending:
        yield Finding("row remap", "warning", "a memory row waits to be replaced", "reset the GPU or reboot", index)
    if gpu.retired_pages:
        yield Finding(
            "retired pages", "warning", str(gpu.retired_pages), "monitor it: at 60, the GPU must be replaced", index
        )
    faults = [reason for reason in gpu.throttle if reason in FAULTY_REASONS]
    if faults:
        fix = "check power supply and cooling of the node"
        yield Finding("clocks", "failed", f"throttled: {', '.join(faults)}", fix, index)
    if gpu.power_limit and gpu.default_power_limit and gpu.power_limit < 0.95 * gpu.default_power_limit:
        value = f"{gpu.power_limit:.0f} W, {gpu.default_power_limit:.0f} W by default"
        yield Finding("power limit", "warning", value, "nvidia-smi --power-limit sets it", index)
    generation, width, most_generation, most_width = gpu.pcie
    if width and most_width and width < most_width:  # unlike the width, the generation drops when a GPU is idle
        value = f"x{width} of x{most_width} (generation {generation} of {most_generation})"
        yield Finding("PCIe", "failed", value, "reseat the GPU, or its riser", index)
    if has_peers and gpu.active_links < gpu.num_links:
        fix = "check 'nvidia-smi nvlink --status' and the fabric manager"
        yield Finding("NVLink", "failed", f"{gpu.active_links} of {gpu.num_links} links are active", fix, index)
