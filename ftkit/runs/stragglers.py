"""Stragglers: GPUs that compute more slowly than the others, found from what each rank measures of itself.

In synchronous training all ranks take equally long for a step, because the fast ones wait for the slow one in each
collective. The times between the collectives distinguish them. Ranks on CPUs are not compared: how long they compute
depends on what else the machine does, so a slow one is no finding about it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ftkit.files import read_json_if_valid
from ftkit.runs.records import Count, Seconds

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout

MIN_STEPS = 20  # steps after which ranks are compared: documents of different lengths make single steps differ
_MIN_SLOWDOWN = 0.1
_MAX_SHOWN = 4


@dataclass(frozen=True)
class RankTiming:
    """What one rank measured: medians over the last `num_steps` steps, in seconds; `step` is the last one."""

    rank: Count
    host: str
    device: str  # as torch calls it: cpu or cuda
    step: Count
    num_steps: Count
    step_seconds: Seconds  # without checkpoints and evaluations
    data_wait_seconds: Seconds  # of a step, waiting for its batch
    compute_seconds: Seconds  # of the forward of all decoder layers, for the first micro-batch, without collectives
    collective_wait_seconds: Seconds  # between these layers, waiting for their all-gathers


@dataclass(frozen=True)
class Straggler:
    """Slow ranks of a host, of which the slowest takes longer by the fraction `slowdown` than those of other hosts.

    On a run's only host, it is compared with the other ranks: the host itself can't be slow, only some of its GPUs.
    """

    host: str
    ranks: tuple[int, ...]
    slowdown: float
    is_only_host: bool = False

    @property
    def reason(self) -> str:
        return f"{100 * self.slowdown:.0f}% slower than the others ({self._list('rank')})"

    def __str__(self) -> str:
        if not self.is_only_host:
            return f"node {self.host} is {self.reason}"
        # A process has one GPU, so on a single host ranks and GPUs have the same numbers.
        are = "are" if len(self.ranks) > 1 else "is"
        return f"{self._list('GPU')} of {self.host} {are} {self.reason}"

    def _list(self, noun: str) -> str:
        plural = "s" if len(self.ranks) > 1 else ""
        more = ", …" if len(self.ranks) > _MAX_SHOWN else ""
        return f"{noun}{plural} {', '.join(map(str, self.ranks[:_MAX_SHOWN]))}{more}"


def read_timings(layout: RunLayout) -> list[RankTiming]:
    """Read the timings of the ranks of the newest start, in the order of ranks."""
    paths = sorted(layout.logs.glob("timing-*.json"))
    found = (read_json_if_valid(path, RankTiming) for path in paths if re.fullmatch(r"timing-\d+", path.stem))
    return [timing for timing in found if timing is not None]


def find_stragglers(timings: Iterable[RankTiming]) -> list[Straggler]:
    """Return hosts with GPUs slower than others, the slowest first; on a single host, its GPUs are compared."""
    known = [
        each for each in timings if each.device == "cuda" and each.num_steps >= MIN_STEPS and each.compute_seconds > 0
    ]
    is_single = len({each.host for each in known}) == 1
    slow: dict[str, dict[int, float]] = {}
    for one in known:
        others = [each for each in known if (each.rank != one.rank if is_single else each.host != one.host)]
        slowdown = one.compute_seconds / median(each.compute_seconds for each in others) - 1 if others else 0.0
        if slowdown >= _MIN_SLOWDOWN:
            slow.setdefault(one.host, {})[one.rank] = slowdown
    found = [Straggler(host, tuple(ranks), max(ranks.values()), is_single) for host, ranks in slow.items()]
    return sorted(found, key=lambda each: each.slowdown, reverse=True)
