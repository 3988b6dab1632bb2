"""Check one node without torch: disks, driver, GPUs through NVML (nvidia-ml-py), and the kernel log.

Only this module uses NVML. The constants are from NVIDIA's NVML API reference.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ftkit import process
from ftkit.config.cluster import recognize_gpu
from ftkit.errors import FtkitError, one_line
from ftkit.health.findings import Finding
from ftkit.runs.gpu_samples import GpuSample

_GIB: Final = 2**30
_MIB: Final = 2**20
_LEAST_FREE_GIB: Final = 2  # free space on the local disk for compiled kernels and temporary files of one run
_SLOW_MB: Final = {"local disk": 200, "shared disk": 50}
"""Minimum MB/s of one writer. Below it, loading weights and writing checkpoints takes hours."""
_THROTTLE_REASONS: Final = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
"""nvmlClocksEventReason*: reasons for clocks below the requested ones. Idle and fixed clocks are not throttling."""
_FAULTY_REASONS: Final = ("hardware slowdown", "hardware thermal", "power brake")
"""Reasons that do not occur on a healthy node. Power caps and software thermal limits do, under full load."""
_NVLINK_BYTES: Final = (138, 139)  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX, in KiB since the driver was loaded
_ALL_LINKS: Final = 2**32 - 1  # scope of a field value: the sum over all links


class Nvml:
    """The GPUs that this process may use. Values are None if the GPU or driver does not support them."""

    def __init__(self, library: ModuleType, indices: Iterable[int]) -> None:
        self._library = library
        self._handles: dict[int, object] = {index: library.nvmlDeviceGetHandleByIndex(index) for index in indices}
        self._gpm: dict[int, object] = {}

    @property
    def driver(self) -> str:
        return str(self._ask("nvmlSystemGetDriverVersion") or "unknown")

    @property
    def cuda(self) -> tuple[int, int] | None:
        number = self._ask("nvmlSystemGetCudaDriverVersion_v2") or self._ask("nvmlSystemGetCudaDriverVersion")
        return None if number is None else (number // 1000, number % 1000 // 10)

    @property
    def names(self) -> list[str]:
        return [str(self._ask("nvmlDeviceGetName", handle) or "") for handle in self._handles.values()]

    def faults(self) -> Iterator[Finding]:
        ask, reset = self._ask, "reset the GPU or reboot"
        num_links = self._library.NVML_NVLINK_MAX_LINKS
        for gpu, handle in self._handles.items():
            if errors := ask("nvmlDeviceGetTotalEccErrors", handle, 1, 0):  # uncorrected, since the driver was loaded
                yield Finding("ECC", "failed", f"{errors} uncorrected errors", reset, gpu)
            _, _, is_pending, has_failed = ask("nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
            if has_failed:
                yield Finding("row remap", "failed", "a memory row could not be replaced", "have the GPU replaced", gpu)
            elif is_pending:
                yield Finding("row remap", "warning", "a memory row waits to be replaced", reset, gpu)
            if pages := ask("nvmlDeviceGetRetiredPages", handle, 1):  # of double-bit errors, before Ampere
                fix = "monitor it: at 60, the GPU must be replaced"
                yield Finding("retired pages", "warning", str(len(pages)), fix, gpu)
            if reasons := [reason for reason in self._throttle(handle) if reason in _FAULTY_REASONS]:
                fix = "check power supply and cooling of the node"
                yield Finding("clocks", "failed", f"throttled: {', '.join(reasons)}", fix, gpu)
            limit = ask("nvmlDeviceGetPowerManagementLimit", handle)
            default = ask("nvmlDeviceGetPowerManagementDefaultLimit", handle)
            if limit and default and limit < 0.95 * default:
                value = f"{limit / 1000:.0f} W, {default / 1000:.0f} W by default"
                yield Finding("power limit", "warning", value, "nvidia-smi --power-limit sets it", gpu)
            width = ask("nvmlDeviceGetCurrPcieLinkWidth", handle)
            most = ask("nvmlDeviceGetMaxPcieLinkWidth", handle)
            if width and most and width < most:  # unlike the width, the generation drops when a GPU is idle
                yield Finding("PCIe", "failed", f"x{width} of x{most}", "reseat the GPU, or its riser", gpu)
            links = [ask("nvmlDeviceGetNvLinkState", handle, link) for link in range(num_links)]
            known = [state for state in links if state is not None]
            if len(self._handles) > 1 and sum(known) < len(known):  # a virtual machine's only GPU has inactive ones
                fix = "check 'nvidia-smi nvlink --status' and the fabric manager"
                yield Finding("NVLink", "failed", f"{sum(known)} of {len(known)} links are active", fix, gpu)

    def samples(self) -> Iterator[GpuSample]:
        """Yield the load of each GPU. This takes a few hundred microseconds."""
        ask, library = self._ask, self._library
        for index, handle in self._handles.items():
            memory = ask("nvmlDeviceGetMemoryInfo", handle)
            rates = ask("nvmlDeviceGetUtilizationRates", handle)
            fields = ask("nvmlDeviceGetFieldValues", handle, [(number, _ALL_LINKS) for number in _NVLINK_BYTES])
            nvlink = [value.value.ullVal for value in fields or () if value.nvmlReturn == 0]
            yield GpuSample(
                index=index,
                utilization=None if rates is None else float(rates.gpu),
                sm_activity=self._sm_activity(index, handle),
                memory_gib=None if memory is None else memory.used / _GIB,
                power=_scaled(ask("nvmlDeviceGetPowerUsage", handle), 1e-3),
                temperature=_scaled(ask("nvmlDeviceGetTemperature", handle, library.NVML_TEMPERATURE_GPU), 1.0),
                clock=_scaled(ask("nvmlDeviceGetClockInfo", handle, library.NVML_CLOCK_SM), 1.0),
                energy=_scaled(ask("nvmlDeviceGetTotalEnergyConsumption", handle), 1e-3),
                throttle=self._throttle(handle),
                nvlink_bytes=1024.0 * sum(nvlink) if nvlink else None,
            )

    def _sm_activity(self, index: int, handle: object) -> float | None:
        """Return the percentage of busy SMs since the last call; None at first, and before Hopper."""
        support = self._ask("nvmlGpmQueryDeviceSupport", handle)
        new = self._ask("nvmlGpmSampleAlloc") if support and support.isSupportedDevice else None
        if new is None:
            return None
        if self._ask("nvmlGpmSampleGet", handle, new) is None:
            self._ask("nvmlGpmSampleFree", new)
            return None
        old = self._gpm.get(index)
        self._gpm[index] = new
        if old is None:
            return None
        request = self._library.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = self._library.NVML_GPM_METRICS_GET_VERSION, 1
        request.sample1, request.sample2 = old, new
        request.metrics[0].metricId = self._library.NVML_GPM_METRIC_SM_UTIL
        answer = self._ask("nvmlGpmMetricsGet", request)
        self._ask("nvmlGpmSampleFree", old)
        return None if answer is None else float(answer.metrics[0].value)

    def _throttle(self, handle: object) -> tuple[str, ...]:
        # The name before driver 535. Future drivers may have only the new one (EventReasons); nvidia-ml-py has both.
        bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        return tuple(name for bit, name in _THROTTLE_REASONS.items() if bits & bit)

    def _ask(self, function: str, *arguments: object) -> Any:
        """Call a function of NVML; None if this GPU, driver or library does not support it."""
        call: Callable[..., Any] | None = getattr(self._library, function, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except self._library.NVMLError:
            return None


@contextmanager
def open_nvml(environment: Mapping[str, str] = os.environ) -> Iterator[Nvml | str]:
    """Yield the GPUs in CUDA_VISIBLE_DEVICES, or the reason why NVML is unavailable."""
    try:
        import pynvml as library  # noqa: PLC0415 - not everywhere installed
    except ImportError:
        yield "nvidia-ml-py is not installed: pip install nvidia-ml-py"
        return
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        yield f"NVML: {error}"
        return
    try:
        num_gpus = library.nvmlDeviceGetCount()
        names = process.visible_gpus(num_gpus, environment.get("CUDA_VISIBLE_DEVICES"))
        by_index = all(name.isdigit() for name in names)
        yield Nvml(library, [int(name) for name in names] if by_index else range(num_gpus))  # with UUIDs, all
    finally:
        library.nvmlShutdown()


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def check_disk(name: str, folder: Path, mib: int) -> Finding:
    """Write a file, sync it, and remove it; `name` is `local disk` or `shared disk`."""
    path = folder / f".ftkit-doctor-{secrets.token_hex(4)}"
    block = os.urandom(_MIB)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free_gib = shutil.disk_usage(folder).free / _GIB
        start = time.perf_counter()
        with path.open("wb") as file:
            file.writelines([block] * mib)
            file.flush()
            os.fsync(file.fileno())
        speed = mib * _MIB / (time.perf_counter() - start) / 1e6
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "free up space" if is_full else "mount it, or set another folder in the profile"
        return Finding(name, "failed", f"{folder}: {one_line(error)}", fix)
    finally:
        with suppress(OSError):  # the folder is a file, or read-only
            path.unlink()
    if name == "local disk" and free_gib < _LEAST_FREE_GIB:
        return Finding(name, "failed", f"{folder}: {free_gib:.1f} GiB free", "free up space")
    value = f"{folder}: {speed:,.0f} MB/s, {free_gib:,.0f} GiB free"
    if speed < _SLOW_MB[name]:
        return Finding(name, "warning", f"{value}: slow", "check whether other jobs write to it")
    return Finding(name, "ok", value)


def check_shared_disk(marker: Path, mib: int) -> Finding:
    """Check the file system of a file that the submitting machine wrote."""
    if not marker.is_file():
        value = f"{marker.parent} is not the same folder as on the submitting machine"
        fix = "mount the file system on this node, or set 'workspace:' to one that all nodes have"
        return Finding("shared disk", "failed", value, fix)
    return check_disk("shared disk", marker.parent, mib)


def check_interfaces(environment: Mapping[str, str], names: Sequence[str] | None = None) -> Iterator[Finding]:
    """Yield the variables that select interfaces missing on this node; `names` are the existing ones.

    NCCL's are prefixes, exact after `=`, and excluded after `^` (NCCL's user guide); gloo's are exact.
    """
    has = [name for _, name in socket.if_nameindex()] if names is None else names
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = environment.get(variable, "")
        is_exact = variable.startswith("GLOO") or wanted.lstrip("^").startswith("=")
        words = wanted.lstrip("^=").split(",")
        found = [name for name in has if any(name == word if is_exact else name.startswith(word) for word in words)]
        if wanted and not (set(has) - {"lo", *found} if wanted.startswith("^") else found):
            value = f"{variable}={wanted} selects none of this node's: {', '.join(has)}"
            yield Finding("interfaces", "failed", value, "set it in 'nccl.environment' or 'environment' of the profile")


def check_gpus(nvml: Nvml, num_gpus: int, device_name: str, environment: Mapping[str, str]) -> list[Finding]:
    """Compare the driver's major CUDA version with the image's, and the GPUs with `device_name` if it is not empty."""
    value = nvml.driver + (f", CUDA {nvml.cuda[0]}.{nvml.cuda[1]}" if nvml.cuda else "")
    driver = Finding("driver", "ok", value)
    needed = re.match(r"(\d+)\.(\d+)", environment.get("CUDA_VERSION", "") or _cuda_of_torch())
    if nvml.cuda and needed and nvml.cuda[0] < int(needed[1]):
        fix = f"install a driver for CUDA {needed[1]}, or use an image with CUDA {nvml.cuda[0]}"
        driver = Finding("driver", "failed", f"{value}; the image has CUDA {needed[0]}", fix)
    names = nvml.names
    value = f"{len(names)} x {', '.join(sorted(set(names))) or 'none'}"
    if len(names) < num_gpus:
        fix = "check the kernel log for Xid errors, and reboot the node"
        return [driver, Finding("GPUs", "failed", f"{value}; {num_gpus} expected", fix)]
    gpus = Finding("GPUs", "ok", value)
    if any(device_name not in name for name in names):
        models = {recognize_gpu(name) for name in names} - {None, recognize_gpu(device_name)}
        fix = "set 'gpu:' in the profile; where nodes differ, request one kind: sbatch_options: [constraint=…]"
        gpus = Finding("GPUs", "failed" if models else "warning", f"{value}; the profile says {device_name}", fix)
    return [driver, gpus, *nvml.faults()]


def _cuda_of_torch() -> str:
    try:
        from torch.version import cuda  # noqa: PLC0415 - slow; NVIDIA's images set CUDA_VERSION
    except ImportError:
        return ""
    return cuda or ""


# --- Faults of hardware and kernel that explain a rank's failure ------------------------------------

_XIDS: Final = {
    13: "a kernel accessed memory out of range, or the GPU is faulty",
    31: "a kernel accessed memory out of range, or the GPU is faulty",
    48: "uncorrectable ECC error",
    63: "ECC: a memory row is to be replaced",
    64: "ECC: a memory row could not be replaced",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many ECC errors",
    94: "uncorrectable ECC error",
    95: "uncorrectable ECC error",
    119: "the GPU's firmware does not respond",
    120: "the GPU's firmware failed",
}
"""NVIDIA's Xid Errors (docs.nvidia.com/deploy/xid-errors), without 43 and 45, which follow from how a process ended."""
_WORDS: Final = {
    r"NVRM: Xid \(PCI:(?P<gpu>[^)]*)\): (?P<xid>\d+)": "Xid {xid} of GPU {gpu}: {meaning}",
    r"out of memory: Killed process (?P<pid>\d+)": "the kernel's OOM killer ended process {pid}",
    r"EDAC .*\bUE\b|Machine check|\[Hardware Error\]": "a hardware error of the host",
    r"temperature (is )?above threshold": "a CPU is too hot, and throttled",
    r"(?P<device>mlx\d\S*|\S+): .*link (is )?down": "link down: {device}",
    r"nfs: server (?P<server>\S+) not responding": "file server {server} does not respond",
    r"I/O error|EXT4-fs error|XFS .*[Cc]orruption|LustreError": "a storage error",
}
"""Patterns of lines in the kernel log, with their meaning."""


def find_fault(since: float) -> str:
    """Return the first fault of this node since a time in seconds since the epoch; empty if none is known.

    Users may not be permitted to read the kernel's log (`kernel.dmesg_restrict`).
    """
    with suppress(FtkitError):
        booted = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
        for line in process.run(["dmesg"], timeout_seconds=10).stdout.splitlines():
            stamp = re.match(r"\[ *(\d+\.\d+)\] (.*)", line)
            if stamp and booted + float(stamp[1]) >= since and (fault := _meaning_of(stamp[2])):
                return f"{fault} (kernel: {one_line(stamp[2])})"
    with open_nvml() as nvml:
        for finding in () if isinstance(nvml, str) else nvml.faults():
            if finding.check in {"ECC", "row remap", "clocks"} and finding.status == "failed":
                return str(finding)
    return ""


def _meaning_of(line: str) -> str:
    for pattern, meaning in _WORDS.items():
        if found := re.search(pattern, line, re.IGNORECASE):
            values = found.groupdict()
            known = _XIDS.get(int(values.get("xid") or 0), "")
            return "" if "xid" in values and not known else meaning.format(**values, meaning=known)
    return ""
