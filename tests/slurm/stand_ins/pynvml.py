"""A fake NVML: healthy GPUs, except for the faults in the node's /mnt/localssd/faults.json.

It replaces nvidia-ml-py if its folder is on PYTHONPATH.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_NVLINK_MAX_LINKS, NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 18, 1, 0
HARDWARE_SLOWDOWN = 0x08


class NVMLError(Exception):
    pass


def _faults() -> dict[str, Any]:
    try:
        faults: dict[str, Any] = json.loads(Path("/mnt/localssd/faults.json").read_text())
    except FileNotFoundError:
        return {}
    return faults


def nvmlInit() -> None:  # noqa: N802 - NVML's names
    pass


nvmlShutdown = nvmlInit  # noqa: N816


def __getattr__(name: str) -> Any:
    values: dict[str, Any] = {
        "nvmlDeviceGetCount": 2,
        "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * 2**30, used=60 * 2**30),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
        "nvmlDeviceGetPowerUsage": 650_000,
        "nvmlDeviceGetTemperature": 61,
        "nvmlDeviceGetClockInfo": 1755,
        "nvmlDeviceGetTotalEnergyConsumption": 5_000_000,
        "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
        "nvmlDeviceGetTotalEccErrors": 0,
        "nvmlDeviceGetNvLinkState": 1,
        "nvmlDeviceGetCurrentClocksThrottleReasons": HARDWARE_SLOWDOWN if _faults().get("slow") else 0,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlSystemGetDriverVersion": "470.57.02" if _faults().get("driver") else "570.86.15",
        "nvmlSystemGetCudaDriverVersion_v2": 11040 if _faults().get("driver") else 12080,
    }
    if name in values:
        return lambda *_: values[name]
    if name == "nvmlDeviceGetHandleByIndex":
        return lambda index: index
    raise AttributeError(name)
