"""Query the GPU driver through NVML (nvidia-ml-py). No other module does.

Values that a GPU or driver does not support are None. Constants are from NVIDIA's NVML API reference.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ftkit.runs.gpu_samples import GpuSample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_GIB: Final = 2**30
THROTTLE_REASONS: Final = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
"""nvmlClocksEventReason*: why clocks are below the requested ones. Idle and fixed clocks are not throttling."""
FAULTY_REASONS: Final = ("hardware slowdown", "hardware thermal", "power brake")
"""Reasons that no load explains on a healthy node; a power cap and software thermal limits occur under full load."""
_NVLINK_BYTES: Final = ((138, "sent"), (139, "received"))
"""NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX, in KiB since the driver was loaded."""
_ALL_LINKS: Final = 2**32 - 1
"""Scope of a field value: the sum over all links."""


@dataclass(frozen=True)
class GpuHealth:
    """State of a GPU: properties that don't change during a job, and signs of faults.

    Attributes:
        index: NVML's index.
        name: name of the GPU model.
        bus_id: PCI address.
        memory_gib: memory in GiB.
        power_limit: power limit in W; `default_power_limit` is the vendor's.
        max_clock: maximum clock of the SMs, in MHz.
        throttle: current reasons, named as in `THROTTLE_REASONS`.
        temperature: temperature in degrees Celsius.
        uncorrected_errors: ECC errors since the driver was loaded.
        retired_pages: number of retired memory pages, on GPUs before Ampere.
        is_remap_failed: whether a memory row could not be remapped: the GPU must be replaced.
        is_remap_pending: whether a row is remapped at the next reset.
        pcie: the PCIe link: current generation, current width, maximum generation, maximum width.
        active_links: number of active NVLinks, of `num_links`.
    """

    index: int
    name: str
    bus_id: str
    memory_gib: float
    power_limit: float | None
    default_power_limit: float | None
    max_clock: int | None
    throttle: tuple[str, ...]
    temperature: int | None
    uncorrected_errors: int | None
    retired_pages: int | None
    is_remap_failed: bool | None
    is_remap_pending: bool | None
    pcie: tuple[int | None, int | None, int | None, int | None]
    active_links: int
    num_links: int


class Nvml:
    """The GPUs that this process may use, through NVML. Created by `open_nvml`."""

    def __init__(self, library: Any, indices: list[int]) -> None:
        self._library = library
        self._handles = {index: library.nvmlDeviceGetHandleByIndex(index) for index in indices}
        self._gpm: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def driver(self) -> str:
        """Version of the driver."""
        return _text(self._ask("nvmlSystemGetDriverVersion")) or "unknown"

    @property
    def cuda(self) -> tuple[int, int] | None:
        """The newest CUDA that the driver supports."""
        number = self._ask("nvmlSystemGetCudaDriverVersion_v2") or self._ask("nvmlSystemGetCudaDriverVersion")
        return None if number is None else (number // 1000, number % 1000 // 10)

    def health(self) -> list[GpuHealth]:
        """Return the state of all GPUs."""
        return [self._health(index, handle) for index, handle in self._handles.items()]

    def samples(self) -> list[GpuSample]:
        """Return the load of all GPUs, which takes a few hundred microseconds per GPU."""
        return [self._sample(index, handle) for index, handle in self._handles.items()]

    def _health(self, index: int, handle: Any) -> GpuHealth:
        ask = self._ask
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        rows = ask("nvmlDeviceGetRemappedRows", handle)  # corrected, uncorrected, pending, failed
        pages = ask("nvmlDeviceGetRetiredPages", handle, 1)  # of double-bit errors
        links = [ask("nvmlDeviceGetNvLinkState", handle, link) for link in range(self._library.NVML_NVLINK_MAX_LINKS)]
        return GpuHealth(
            index=index,
            name=_text(ask("nvmlDeviceGetName", handle)),
            bus_id=_text(getattr(ask("nvmlDeviceGetPciInfo", handle), "busId", "")),
            memory_gib=memory.total / _GIB if memory else 0.0,
            power_limit=_scaled(ask("nvmlDeviceGetPowerManagementLimit", handle), 1e-3),
            default_power_limit=_scaled(ask("nvmlDeviceGetPowerManagementDefaultLimit", handle), 1e-3),
            max_clock=ask("nvmlDeviceGetMaxClockInfo", handle, self._library.NVML_CLOCK_SM),
            throttle=self._throttle(handle),
            temperature=ask("nvmlDeviceGetTemperature", handle, self._library.NVML_TEMPERATURE_GPU),
            uncorrected_errors=ask("nvmlDeviceGetTotalEccErrors", handle, 1, 0),  # uncorrected, volatile
            retired_pages=None if pages is None else len(pages),
            is_remap_failed=None if rows is None else bool(rows[3]),
            is_remap_pending=None if rows is None else bool(rows[2]),
            pcie=(
                ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
                ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
                ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
                ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
            ),
            active_links=sum(state == 1 for state in links),
            num_links=sum(state is not None for state in links),
        )

    def _sample(self, index: int, handle: Any) -> GpuSample:
        ask = self._ask
        memory, rates = ask("nvmlDeviceGetMemoryInfo", handle), ask("nvmlDeviceGetUtilizationRates", handle)
        return GpuSample(
            index=index,
            utilization=None if rates is None else float(rates.gpu),
            sm_activity=self._sm_activity(index, handle),
            memory_gib=None if memory is None else memory.used / _GIB,
            power=_scaled(ask("nvmlDeviceGetPowerUsage", handle), 1e-3),
            temperature=_scaled(ask("nvmlDeviceGetTemperature", handle, self._library.NVML_TEMPERATURE_GPU), 1.0),
            clock=_scaled(ask("nvmlDeviceGetClockInfo", handle, self._library.NVML_CLOCK_SM), 1.0),
            energy=_scaled(ask("nvmlDeviceGetTotalEnergyConsumption", handle), 1e-3),
            throttle=self._throttle(handle),
            nvlink_bytes=self._nvlink_bytes(handle),
        )

    def _sm_activity(self, index: int, handle: Any) -> float | None:
        """Return the percentage of busy SMs since the last call; None at first, and before Hopper."""
        support = self._ask("nvmlGpmQueryDeviceSupport", handle)
        new = self._ask("nvmlGpmSampleAlloc") if support and support.isSupportedDevice else None
        if new is None:
            return None
        if self._ask("nvmlGpmSampleGet", handle, new) is None:
            self._ask("nvmlGpmSampleFree", new)
            return None
        old, self._gpm[index] = self._gpm.get(index), new
        if old is None:
            return None
        request = self._library.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = self._library.NVML_GPM_METRICS_GET_VERSION, 1
        request.sample1, request.sample2 = old, new
        request.metrics[0].metricId = self._library.NVML_GPM_METRIC_SM_UTIL
        answer = self._ask("nvmlGpmMetricsGet", request)
        self._ask("nvmlGpmSampleFree", old)
        return None if answer is None else float(answer.metrics[0].value)

    def _throttle(self, handle: Any) -> tuple[str, ...]:
        # The name before driver 535. A future driver may have only the newer one (EventReasons); nvidia-ml-py has both.
        bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)

    def _nvlink_bytes(self, handle: Any) -> float | None:
        values = self._ask("nvmlDeviceGetFieldValues", handle, [(number, _ALL_LINKS) for number, _ in _NVLINK_BYTES])
        known = [value.value.ullVal for value in values or () if value.nvmlReturn == 0]
        return 1024.0 * sum(known) if known else None

    def _ask(self, function: str, *arguments: Any) -> Any:
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
        yield Nvml(library, visible_indices(library.nvmlDeviceGetCount(), environment.get("CUDA_VISIBLE_DEVICES")))
    finally:
        library.nvmlShutdown()


def visible_indices(count: int, visible: str | None) -> list[int]:
    """Return the indices of the GPUs that a process may use, of `count`; all if names are not numbers (UUIDs, MIG)."""
    if visible is None:
        return list(range(count))
    words = [word.strip() for word in visible.split(",") if word.strip()]
    if not all(word.isdigit() for word in words):
        return list(range(count))
    return [int(word) for word in words if int(word) < count]


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
