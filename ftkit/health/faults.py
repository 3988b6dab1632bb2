"""Faults of this node's hardware and kernel, which explain why a rank failed: the kernel's log, and NVML."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from typing import Final

from ftkit import process
from ftkit.errors import FtkitError, one_line
from ftkit.health.node import open_nvml

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
"""NVIDIA's Xid Errors (docs.nvidia.com/deploy/xid-errors). 43 and 45 follow from how a process ended."""
_WORDS: Final = {
    r"NVRM: Xid \(PCI:(?P<gpu>[^)]*)\): (?P<xid>\d+)": "Xid {xid} of GPU {gpu}: {meaning}",
    r"out of memory: Killed process (?P<pid>\d+)": "the kernel's OOM killer ended process {pid}",
    r"EDAC .*\bUE\b|Machine check|\[Hardware Error\]": "a hardware error of the host",
    r"temperature (is )?above threshold": "a CPU is too hot, and throttled",
    r"(?P<device>mlx\d\S*|\S+): .*link (is )?down": "link down: {device}",
    r"nfs: server (?P<server>\S+) not responding": "file server {server} does not respond",
    r"I/O error|EXT4-fs error|XFS .*[Cc]orruption|LustreError": "a storage error",
}
"""What the kernel writes, in lines of its log, and what it means."""


def find_fault(since: float) -> str:
    """Return the first fault of this node since a time in seconds since the epoch; empty if none is known.

    Users may not be permitted to read the kernel's log (`kernel.dmesg_restrict`).
    """
    with suppress(FtkitError):
        booted = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
        for line in process.run(["dmesg"], timeout_seconds=10).stdout.splitlines():
            stamp = re.match(r"\[ *(\d+\.\d+)\] (.*)", line)
            if stamp and booted + float(stamp[1]) >= since and (fault := _read(stamp[2])):
                return f"{fault} (kernel: {one_line(stamp[2])})"
    with open_nvml() as nvml:
        for finding in () if isinstance(nvml, str) else nvml.faults():
            if finding.check in {"ECC", "row remap", "clocks"} and finding.status == "failed":
                return str(finding)
    return ""


def _read(line: str) -> str:
    for pattern, meaning in _WORDS.items():
        if found := re.search(pattern, line, re.IGNORECASE):
            values = found.groupdict()
            known = _XIDS.get(int(values.get("xid") or 0), "")
            return "" if "xid" in values and not known else meaning.format(**values, meaning=known)
    return ""
