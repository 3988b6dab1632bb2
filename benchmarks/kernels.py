"""Where the GPU's time of a training step goes: kernels of a trace by torch.profiler, grouped by what they do."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

GROUPS = (
    ("fused elementwise and reductions", r"^triton_(poi|red|per)_"),
    ("attention", r"flash|fmha|flex_attention|attention|sdpa|cudnn_generated"),
    ("matmuls", r"gemm|nvjet|cutlass|xmma|triton_(tem|mm)|scaled_mm|cublas|splitK"),
    ("4-bit weights", r"[dD]equantize|quantize|4bit"),
    ("optimizer", r"multi_tensor|fused_adam|adamw|foreach"),
    ("copies", r"^Mem(cpy|set)"),
)
"""Groups by the first pattern that a kernel's name matches; what matches none is 'other'."""


class KernelTime(NamedTuple):
    """Milliseconds and launches of one kernel, or of a group of them, in one step."""

    name: str
    milliseconds: float
    launches: float


class StepTrace(NamedTuple):
    """One step on the GPU.

    Attributes:
        milliseconds: from the first kernel's start to the last one's end, divided by the steps.
        busy: milliseconds in which at least one kernel or copy ran.
        groups: sums by group, longest first.
        kernels: the longest kernels.
    """

    milliseconds: float
    busy: float
    groups: list[KernelTime]
    kernels: list[KernelTime]


def read_trace(path: Path, num_steps: int, *, most: int = 30) -> StepTrace | None:
    """Summarize the kernels of a compressed Chrome trace of `num_steps` steps; None if there are none, as on CPUs.

    The host is ahead of the GPU, so a kernel belongs to the step in which it was launched.
    """
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    steps = [event for event in events if event.get("name", "").startswith("ProfilerStep#") and "dur" in event]
    begin = min(event["ts"] for event in steps)
    end = max(event["ts"] + event["dur"] for event in steps)
    launched = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in {"cuda_runtime", "cuda_driver"} and begin <= event["ts"] < end
    }
    on_device = [
        event
        for event in events
        if event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"} and event["args"].get("correlation") in launched
    ]
    if not on_device:
        return None
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in on_device)
    length = max(end for _, end in spans) - spans[0][0]
    named = [(event["name"], event["dur"]) for event in on_device]
    grouped = [(group_of(name), duration) for name, duration in named]
    return StepTrace(
        length / 1e3 / num_steps,
        _union(spans) / 1e3 / num_steps,
        _sums(grouped, num_steps),
        _sums(((name[:120], duration) for name, duration in named), num_steps)[:most],
    )


def group_of(kernel: str) -> str:
    """Return the group of a kernel by its name."""
    return next((group for group, pattern in GROUPS if re.search(pattern, kernel)), "other")


def _union(spans: list[tuple[float, float]]) -> float:
    """Return the time that sorted spans cover together; streams overlap."""
    covered, reached = 0.0, spans[0][0]
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _sums(durations: Iterable[tuple[str, float]], num_steps: int) -> list[KernelTime]:
    """Sum microseconds by name; return milliseconds and launches of a step, longest first."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, duration in durations:
        found[name].append(duration)
    times = [KernelTime(name, sum(all_) / 1e3 / num_steps, len(all_) / num_steps) for name, all_ in found.items()]
    return sorted(times, key=lambda time: -time.milliseconds)
