"""Samples of a run's GPUs: one file per node, merged when they are read."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final

from ftkit.files import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from ftkit.planning.layout import RunLayout

_MAX_GAP_SECONDS: Final = 300.0
"""Maximum seconds between two samples of a node; longer gaps count no energy, since the job did not run."""
_TAIL_BYTES: Final = 2**16
_MAX_BYTES: Final = 2**28
_MAX_PARTS: Final = 240
"""Maximum points of a curve: about as many as can be distinguished on a page."""


@dataclass(frozen=True)
class GpuSample:
    """Utilization of a GPU at one time; None for values that it does not measure.

    Attributes:
        index: NVML's index.
        utilization: percentage of the last moments in which a kernel ran.
        sm_activity: percent of the SMs that were busy since the last sample (Hopper and newer).
        memory_gib: used memory.
        power: in W.
        temperature: in degrees Celsius.
        clock: clock of the SMs, in MHz.
        energy: in J since the driver was loaded.
        throttle: why clocks are below the requested ones.
        nvlink_bytes: sent and received since the driver was loaded.
    """

    index: int
    utilization: float | None = None
    sm_activity: float | None = None
    memory_gib: float | None = None
    power: float | None = None
    temperature: float | None = None
    clock: float | None = None
    energy: float | None = None
    throttle: tuple[str, ...] = ()
    nvlink_bytes: float | None = None


@dataclass(frozen=True)
class NodeSample:
    """The GPUs of one node at one time.

    Attributes:
        time: in seconds since the epoch.
        host: the node.
        network_bytes: sent and received by its adapters since it was booted.
        gpus: a sample of each.
    """

    time: float
    host: str
    network_bytes: float
    gpus: tuple[GpuSample, ...]


@dataclass(frozen=True)
class GpuSummary:
    """Summary of a run's samples; None for values that were not measured.

    Attributes:
        num_gpus: number of sampled GPUs.
        utilization: mean, in percent.
        sm_activity: mean, in percent.
        power: mean of a GPU, in W.
        peak_memory_gib: the most memory that a GPU used.
        peak_temperature: that of the hottest GPU, in degrees Celsius.
        energy_kwh: energy of all GPUs.
        throttled: fraction of the samples in which clocks were limited, by reason.
    """

    num_gpus: int
    utilization: float | None
    sm_activity: float | None
    power: float | None
    peak_memory_gib: float | None
    peak_temperature: float | None
    energy_kwh: float | None
    throttled: dict[str, float]


@dataclass(frozen=True)
class GpuCurve:
    """One number of all GPUs over a run's time, in equal parts of it; NaN where nothing was sampled.

    Attributes:
        seconds: the middle of each part, since `begin` of `gpu_curve`.
        mean: over the samples of all GPUs.
        lowest: the lowest of the GPUs' means: how idle the least busy GPU was.
        highest: the highest of the GPUs' means.
    """

    seconds: tuple[float, ...] = ()
    mean: tuple[float, ...] = ()
    lowest: tuple[float, ...] = ()
    highest: tuple[float, ...] = ()


def to_line(sample: NodeSample) -> str:
    """Return a sample as a line of JSON."""
    return json.dumps(asdict(sample), separators=(",", ":")) + "\n"


def read_samples(layout: RunLayout) -> list[NodeSample]:
    """Return the samples of all nodes, oldest first; damaged lines are skipped."""
    found = [sample for path in _files(layout) for sample in _parse(_read(path, _MAX_BYTES))]
    return sorted(found, key=lambda sample: sample.time)


def read_last_samples(layout: RunLayout) -> list[NodeSample]:
    """Return the newest sample of each node, by name."""
    newest = (list(_parse(_read(path, _TAIL_BYTES)))[-1:] for path in _files(layout))
    return [sample for samples in newest for sample in samples]


def summarize_samples(samples: Sequence[NodeSample]) -> GpuSummary | None:
    """Summarize a run's samples; None if there are none."""
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
        energy_kwh=None if energy is None else energy / 3.6e6,
        throttled={reason: fmean(reason in gpu.throttle for gpu in gpus) for reason in reasons},
    )


def gpu_curve(
    samples: Sequence[NodeSample], value: Callable[[GpuSample], float | None], begin: float | None = None
) -> GpuCurve:
    """Return one number of all GPUs over time; empty if no sample has it.

    Args:
        samples: samples of all nodes, oldest first.
        value: returns the number of a sample.
        begin: where time starts, in seconds since the epoch; at the first sample if None.
    """
    known = [
        (sample.time, (sample.host, gpu.index), number)
        for sample in samples
        for gpu in sample.gpus
        if (number := value(gpu)) is not None
    ]
    if not known:
        return GpuCurve()
    start, end = known[0][0], known[-1][0]
    width = max((end - start) / _MAX_PARTS, 2 * _usual_gap(samples), 1e-3)
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


def _usual_gap(samples: Sequence[NodeSample]) -> float:
    """Return the median time between two samples of one node; 0 if no node has two."""
    by_host: dict[str, list[float]] = {}
    for sample in samples:
        by_host.setdefault(sample.host, []).append(sample.time)
    gaps = [after - before for times in by_host.values() for before, after in pairwise(times)]
    return median(gaps) if gaps else 0.0


def _energy(samples: Sequence[NodeSample]) -> float | None:
    """Return the energy in J of all GPUs: from their counters, or from power and time if they have none."""
    by_gpu: dict[tuple[str, int], list[tuple[float, GpuSample]]] = {}
    for sample in samples:
        for gpu in sample.gpus:
            by_gpu.setdefault((sample.host, gpu.index), []).append((sample.time, gpu))
    total, is_known = 0.0, False
    for series in by_gpu.values():
        for (start, first), (end, second) in pairwise(series):
            if not 0 < end - start <= _MAX_GAP_SECONDS:
                continue
            if first.energy is not None and second.energy is not None and second.energy >= first.energy:
                total += second.energy - first.energy
            elif first.power is not None and second.power is not None:
                total += (first.power + second.power) / 2 * (end - start)
            else:
                continue
            is_known = True
    return total if is_known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _files(layout: RunLayout) -> list[Path]:
    return sorted(layout.gpu_samples.glob("*.jsonl"))


def _read(path: Path, tail: int) -> str:
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, 2) - tail))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def _parse(text: str) -> Iterator[NodeSample]:
    for line in text.splitlines():
        sample = _sample(line)
        if sample is not None:
            yield sample


def _sample(line: str) -> NodeSample | None:
    """Parse one line without pydantic: there are thousands, most of them read for a mean."""
    try:
        values: dict[str, Any] = json.loads(line)
        gpus = tuple(GpuSample(**{**gpu, "throttle": tuple(gpu.get("throttle", ()))}) for gpu in values["gpus"])
        return NodeSample(float(values["time"]), str(values["host"]), float(values["network_bytes"]), gpus)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
