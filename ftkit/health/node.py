"""Checks of one node by itself: its disks, its shared folder, its driver, the state and the speed of its GPUs."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ftkit import process
from ftkit.config.cluster import GpuModel
from ftkit.errors import FtkitError, one_line
from ftkit.health.findings import Finding, Status, failures
from ftkit.health.measure import (
    CollectiveRates,
    DeviceProcesses,
    DeviceRates,
    Group,
    MeasuredDevice,
    MeasureError,
    free_port,
    least_link_bandwidth,
    least_matmul,
    least_memory_bandwidth,
)
from ftkit.health.nvml import FAULTY_REASONS, Nvml, open_nvml
from ftkit.planning.training_setup import GPUS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ftkit.health.nvml import GpuHealth

_MIB: Final = 2**20
_DCGM_SECONDS: Final = 40.0
_LEAST_FREE_GIB: Final = 2
"""Free space on the local disk for compiled kernels and temporary files of one run."""
_SLOW_MB: Final = {"local disk": 200, "shared disk": 50}
"""Minimum MB/s of one writer: at less, loading weights and writing checkpoints take hours."""


GROUP_SECONDS: Final = 40.0


@dataclass(frozen=True)
class NodeJob:
    """The checks to run on one node.

    Attributes:
        host: name of the node among `hosts`, which are all nodes of the job.
        port: port of the rendezvous on the first responding node; the following ports are for measurements.
        device: device of training, with `num_devices` on each node.
        gpu: GPU model in the cluster's profile, if known.
        network_gbps: network bandwidth of a node, in Gbit/s, if known.
        local_dir: folder on the node's own disk.
        shared_file: a file that exists if the shared file system is mounted.
        is_short: skip slow checks, as before training: pairs are measured only if all nodes together failed.
        wait_seconds: maximum wait for nodes that start late.
        absent_dir: folder in which HOST.absent marks a node that will not take part.
    """

    host: str
    hosts: tuple[str, ...]
    port: int
    device: MeasuredDevice
    num_devices: int
    gpu: GpuModel | None
    network_gbps: float | None
    local_dir: Path
    shared_file: Path | None
    is_short: bool
    wait_seconds: float
    absent_dir: Path | None = None


@dataclass(frozen=True)
class NodeReport:
    """Results of one node.

    Attributes:
        host: its name.
        findings: findings of all checks.
        devices: rates of each device.
        within: collectives among the devices of the node.
        between: collectives among all healthy nodes.
        pairs: bus bandwidth in GB/s of all-reduces with another node, by its name.
        time: time of the node's clock when all nodes had joined.
        seconds: duration of the checks.
    """

    host: str
    findings: tuple[Finding, ...] = ()
    devices: tuple[DeviceRates, ...] = ()
    within: CollectiveRates | None = None
    between: CollectiveRates | None = None
    pairs: dict[str, float] = field(default_factory=dict)
    time: float = 0.0
    seconds: float = 0.0

    @property
    def failed(self) -> list[Finding]:
        """Reasons why the node can't be used; empty if it can."""
        return failures(self.findings)


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


# --- All checks of one node ------------------------------------------------------------------------


def check_alone(job: NodeJob, environment: Mapping[str, str], processes: DeviceProcesses) -> NodeReport:
    """Check a node without the others."""
    on_gpu = job.device == "cuda"
    name = GPUS[job.gpu].device_name.removeprefix("NVIDIA ") if job.gpu else ""
    expected = Expectation(job.local_dir, job.shared_file, job.num_devices if on_gpu else 0, name)
    mib = 64 if job.is_short else 256
    with open_nvml(environment) as nvml:
        findings = check_machine(expected, nvml, environment, mib if on_gpu else mib // 4, is_short=job.is_short)
    try:
        devices = processes.rates(is_short=job.is_short)
    except MeasureError as error:
        fix = "check 'nvidia-smi' and the kernel log on that node"
        return NodeReport(job.host, (*findings, Finding("matrix products", "failed", str(error), fix)))
    findings += _judge_devices(job, devices)
    within = None
    if job.num_devices > 1:
        group = Group("127.0.0.1", free_port(), 0, job.num_devices, 2**30 if on_gpu else 2**20, GROUP_SECONDS)
        try:
            within = processes.collectives(group)
            findings.append(judge_collectives(job, "within node", within, least_link_bandwidth(job.gpu)))
        except MeasureError as error:
            fix = "check 'nvidia-smi nvlink --status' and 'nvidia-smi topo -m' on that node"
            findings.append(Finding("within node", "failed", str(error), fix))
    if on_gpu:
        with open_nvml(environment) as nvml:  # while they are still warm
            throttled = [] if isinstance(nvml, str) else [each for each in nvml.health() if each.throttle]
        hot = "; ".join(f"GPU {each.index}: {', '.join(each.throttle)}" for each in throttled)
        if hot:
            findings.append(Finding("under load", "ok", f"clocks limited by {hot}"))
    return NodeReport(job.host, tuple(findings), tuple(devices), within)


def below_peak(job: NodeJob) -> Status:
    """Return the status of a rate below the expected one: before training, a warning; only slower than others fails.

    A site may limit the power of all its GPUs, or a profile may overstate the network, without a fault of the node.
    """
    return "warning" if job.is_short else "failed"


def _judge_devices(job: NodeJob, devices: list[DeviceRates]) -> Iterator[Finding]:
    least, least_memory = least_matmul(job.gpu), least_memory_bandwidth(job.gpu)
    rates = ", ".join(f"{each.matmul:,.3g}" for each in devices)
    slow = [index for index, each in enumerate(devices) if least is not None and each.matmul < least]
    yield Finding("matrix products", "ok", f"{rates} TFLOP/s")
    for index in slow:
        value = f"{devices[index].matmul:,.0f} TFLOP/s, at least {least:,.0f} expected"
        yield Finding("matrix products", below_peak(job), value, "check its clocks, power limit and cooling", index)
    for index, each in enumerate(devices):
        if least_memory is not None and each.memory < least_memory:
            value = f"{each.memory:,.0f} GB/s, at least {least_memory:,.0f} expected"
            yield Finding("GPU memory", below_peak(job), value, "have the GPU replaced", index)


def judge_collectives(job: NodeJob, name: str, rates: CollectiveRates, least: float | None) -> Finding:
    """Compare measured collectives with the least expected rate, in GB/s."""
    value = f"all-reduce {rates.all_reduce:,.3g}, all-gather {rates.all_gather:,.3g} GB/s"
    value += f" by {rates.transport}" if rates.transport else ""
    if least is not None and rates.all_reduce < least:
        fix = "compare the pairs; check the network's links and NCCL's plug-in"
        return Finding(name, below_peak(job), f"{value}; at least {least:,.0f} GB/s expected", fix)
    return Finding(name, "ok", value)
