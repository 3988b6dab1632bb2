"""Samples of a run's GPUs: one file per node, merged when they are read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Final

from ftkit.files import open_regular

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout

_MAX_GAP_SECONDS: Final = 300.0
"""Maximum seconds between two samples of a node. Longer gaps add no energy: the job did not run."""
_TAIL_BYTES: Final = 2**16
_MAX_BYTES: Final = 2**28
_PARSED_BYTES: Final = 2**23  # of all nodes together: about 8,000 samples of 8 GPUs, in a second
_MAX_STRIDE: Final = 25  # 250 seconds between two samples, less than the longest gap
_MAX_PARTS: Final = 240  # maximum points of a curve, about what a page can resolve


@dataclass(frozen=True)
class GpuSample:
    """Utilization of a GPU at one time; None for values that it does not measure."""

    index: int  # NVML's
    utilization: float | None = None  # percent of the last sampling period in which a kernel ran
    sm_activity: float | None = None  # percent of SMs busy since the last sample (Hopper and newer)
    memory_gib: float | None = None
    power: float | None = None  # W
    temperature: float | None = None  # degrees Celsius
    clock: float | None = None  # of the SMs, in MHz
    energy: float | None = None  # J since the driver was loaded
    throttle: tuple[str, ...] = ()  # reasons why clocks are below the requested ones
    nvlink_bytes: float | None = None  # sent and received since the driver was loaded


@dataclass(frozen=True)
class NodeSample:
    """The GPUs of one node at one time, in seconds since the epoch."""

    time: float
    host: str
    network_bytes: float  # sent and received by the node's adapters since it was booted
    gpus: tuple[GpuSample, ...]


@dataclass(frozen=True)
class GpuSummary:
    """Means, peaks and sums of a run's samples in the units of `GpuSample`; None for values that were not measured."""

    num_gpus: int
    utilization: float | None
    sm_activity: float | None
    power: float | None
    peak_memory_gib: float | None
    peak_temperature: float | None
    energy_kwh: float | None
    throttled: dict[str, float]  # fraction of samples with limited clocks, by reason


@dataclass(frozen=True)
class GpuCurve:
    """One metric over all GPUs and equal intervals of a run's time; NaN where nothing was sampled."""

    seconds: tuple[float, ...] = ()  # the middle of each interval
    mean: tuple[float, ...] = ()
    lowest: tuple[float, ...] = ()  # of the GPUs' means
    highest: tuple[float, ...] = ()


def to_line(sample: NodeSample) -> str:
    return json.dumps(asdict(sample), separators=(",", ":")) + "\n"


def read_samples(layout: RunLayout) -> list[NodeSample]:
    """Return the samples of all nodes, oldest first, without damaged lines; large files are thinned, up to 1 in 25."""
    found = [sample for samples in _read(layout, _MAX_BYTES) for sample in samples]
    return sorted(found, key=lambda sample: sample.time)


def read_last_samples(layout: RunLayout) -> list[NodeSample]:
    """Return the newest sample of each node, by name."""
    return [samples[-1] for samples in _read(layout, _TAIL_BYTES) if samples]


def _read(layout: RunLayout, tail: int) -> list[list[NodeSample]]:
    """Read the samples of each node in the last bytes of its file."""
    texts = []
    for path in sorted(layout.gpu_samples.glob("*.jsonl")):
        with suppress(OSError), open_regular(path) as file:
            file.seek(max(0, file.seek(0, 2) - tail))
            texts.append(file.read())
    stride = max(1, min(_MAX_STRIDE, sum(map(len, texts)) // _PARSED_BYTES))
    chosen = (text.decode("utf-8", errors="replace").splitlines()[::-stride] for text in texts)  # with the newest
    return [[sample for line in reversed(lines) if (sample := _parse(line))] for lines in chosen]


def _parse(line: str) -> NodeSample | None:
    """Parse one line without pydantic: there are thousands, most of them read for a mean."""
    try:
        values = json.loads(line)
        gpus = tuple(GpuSample(**{**gpu, "throttle": tuple(gpu.get("throttle", ()))}) for gpu in values["gpus"])
        return NodeSample(float(values["time"]), str(values["host"]), float(values["network_bytes"]), gpus)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def summarize_samples(samples: Sequence[NodeSample]) -> GpuSummary | None:
    gpus = [gpu for sample in samples for gpu in sample.gpus]
    if not gpus:
        return None
    reasons = sorted({reason for gpu in gpus for reason in gpu.throttle})
    energy = _energy(samples)
    return GpuSummary(
        num_gpus=len({(sample.host, gpu.index) for sample in samples for gpu in sample.gpus}),
        utilization=_mean(gpu.utilization for gpu in gpus),
        sm_activity=_mean(gpu.sm_activity for gpu in gpus),
        power=_mean(gpu.power for gpu in gpus),
        peak_memory_gib=max((gpu.memory_gib for gpu in gpus if gpu.memory_gib is not None), default=None),
        peak_temperature=max((gpu.temperature for gpu in gpus if gpu.temperature is not None), default=None),
        energy_kwh=energy / 3.6e6 if energy else None,
        throttled={reason: fmean(reason in gpu.throttle for gpu in gpus) for reason in reasons},
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _energy(samples: Sequence[NodeSample]) -> float:
    """Return the energy in J of all GPUs: from their counters, or from power and time if they have none."""
    total = 0.0
    last: dict[tuple[str, int], tuple[float, GpuSample]] = {}
    for sample in samples:
        for gpu in sample.gpus:
            begin, former = last.get((sample.host, gpu.index), (sample.time, gpu))
            last[sample.host, gpu.index] = sample.time, gpu
            seconds = sample.time - begin
            if not 0 < seconds <= _MAX_GAP_SECONDS:
                continue
            if former.energy is not None and gpu.energy is not None and gpu.energy >= former.energy:
                total += gpu.energy - former.energy
            elif former.power is not None and gpu.power is not None:
                total += (former.power + gpu.power) / 2 * seconds
    return total


def gpu_curve(
    samples: Sequence[NodeSample], value: Callable[[GpuSample], float | None], begin: float | None = None
) -> GpuCurve:
    """Return one metric over all GPUs since `begin` or the first sample; empty if no sample has it.

    `samples` are from all nodes, oldest first.
    """
    known = [
        (sample.time, (sample.host, gpu.index), number)
        for sample in samples
        for gpu in sample.gpus
        if (number := value(gpu)) is not None
    ]
    if not known:
        return GpuCurve()
    times: dict[str, list[float]] = {}
    for sample in samples:
        times.setdefault(sample.host, []).append(sample.time)
    gaps = [after - before for of_host in times.values() for before, after in pairwise(of_host)]
    start, end = known[0][0], known[-1][0]
    width = max((end - start) / _MAX_PARTS, 2 * median(gaps or [0.0]), 1e-3)
    parts: list[dict[tuple[str, int], list[float]]] = [{} for _ in range(int((end - start) / width) + 1)]
    for time, gpu, number in known:
        parts[int((time - start) / width)].setdefault(gpu, []).append(number)
    means = [[fmean(numbers) for numbers in part.values()] for part in parts]
    offset = start - (start if begin is None else begin)
    return GpuCurve(
        seconds=tuple(offset + (index + 0.5) * width for index in range(len(parts))),
        mean=tuple(fmean(each) if each else math.nan for each in means),
        lowest=tuple(min(each, default=math.nan) for each in means),
        highest=tuple(max(each, default=math.nan) for each in means),
    )
