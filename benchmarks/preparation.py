"""The cost of one preparation, which ftkit and each peer measure alike; works with the packages of any peer."""

from __future__ import annotations

import json
import resource
import time
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Cost:
    """Cost and result of one preparation.

    Attributes:
        cpu_seconds: user and system time of the process and its ended children.
        num_tokens: tokens in packs, without padding.
        fill_ratio: fraction of the packs that is not padding.
        digest: identifies the packs; empty for peers.
    """

    seconds: float
    cpu_seconds: float
    num_tokens: int
    fill_ratio: float
    digest: str = ""


class Stopwatch:
    """Measures wall and CPU time from its creation on."""

    def __init__(self) -> None:
        self._began, self._cpu = time.perf_counter(), _cpu_seconds()

    def cost(self, num_tokens: int, fill_ratio: float, digest: str = "") -> Cost:
        """Return the cost of a preparation that was completed at the last `stop`."""
        return Cost(self.seconds, self.cpu_seconds, num_tokens, fill_ratio, digest)

    def stop(self) -> None:
        """Record the time since the creation."""
        self.seconds, self.cpu_seconds = time.perf_counter() - self._began, _cpu_seconds() - self._cpu


def print_cost(cost: Cost) -> None:
    """Print a cost as the last line of the output, where `benchmarks/data.py` reads it."""
    print(json.dumps(asdict(cost)), flush=True)


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
