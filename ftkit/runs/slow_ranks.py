"""Find ranks that hold up a run, from each rank's own reports: slow ranks, and ranks that make others hang."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING

from ftkit.errors import first_few
from ftkit.files import read_json_if_valid
from ftkit.runs.records import Count, Seconds

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout

MIN_STEPS = 20  # steps before ranks are compared: document lengths make single steps differ
_MIN_SLOWDOWN = 0.1


@dataclass(frozen=True)
class RankTiming:
    """Timings of one rank: medians over the last `num_steps` steps, in seconds; `step` is the last one."""

    rank: Count
    host: str
    device: str  # as torch calls it: cpu or cuda
    step: Count
    num_steps: Count
    step_seconds: Seconds  # without checkpoints and evaluations
    compute_seconds: Seconds  # of the forward of all decoder layers, for the first micro-batch, without collectives


@dataclass(frozen=True)
class Straggler:
    """Slow ranks of a host. The slowest takes longer than the ranks of other hosts by the fraction `slowdown`.

    On a single host, ranks are compared with each other: only some of its GPUs can be slow.
    """

    host: str
    ranks: tuple[int, ...]
    slowdown: float
    is_only_host: bool = False

    @property
    def reason(self) -> str:
        return f"{100 * self.slowdown:.0f}% slower than the others ({_listed('rank', self.ranks)})"

    def __str__(self) -> str:
        if not self.is_only_host:
            return f"node {self.host} is {self.reason}"
        # A process has one GPU, so on a single host ranks and GPUs have the same numbers.
        are = "are" if len(self.ranks) > 1 else "is"
        return f"{_listed('GPU', self.ranks)} of {self.host} {are} {self.reason}"


def read_timings(layout: RunLayout) -> list[RankTiming]:
    """Read the timings of the ranks of the newest start, in the order of ranks."""
    paths = sorted(layout.logs.glob("timing-*.json"))
    found = (read_json_if_valid(path, RankTiming) for path in paths if re.fullmatch(r"timing-\d+", path.stem))
    return [timing for timing in found if timing is not None]


def find_stragglers(timings: Iterable[RankTiming]) -> list[Straggler]:
    """Return hosts with GPUs slower than others, the slowest first; on a single host, its GPUs are compared.

    Fast ranks wait for slow ones in collectives, so steps take equally long on all ranks; only the times between
    collectives differ. Ranks on CPUs are not compared, because other load on the machine affects their times.
    """
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


# --- Ranks that others wait for -------------------------------------------------------------------


@dataclass(frozen=True)
class HangReport:
    """A rank's activity while a step takes far too long; `state` is a neighbor's report about a rank without one.

    `collective` is the collective that it waits in, with the group in brackets; `number` counts that group's.
    """

    host: str
    step: Count
    phase: str  # of the step, as `ftkit.train.loop.Phase`; or "after", for checkpoints and evaluations
    since: Seconds  # when the step began, or what is after it
    place: str = ""  # the line of Python
    collective: str = ""
    number: Count = 0
    state: str = ""

    @property
    def doing(self) -> str:
        return self.state or (f"in {self.collective} {self.number}" if self.collective else f"at {self.place}")

    def __str__(self) -> str:
        phase = {"after": "after step", "batch": "loading the batch of step"}.get(self.phase, f"{self.phase} of step")
        return f"{self.doing}, {phase} {self.step}, since {datetime.fromtimestamp(self.since, UTC):%H:%M:%S} UTC"


def read_hang_reports(layout: RunLayout) -> dict[int, HangReport]:
    """Read the reports of the ranks of the newest start, by rank."""
    found = {int(match[1]): path for path in layout.logs.glob("hang-*.json")
             if (match := re.fullmatch(r"hang-(\d+)", path.stem))}  # fmt: skip
    reports = {rank: read_json_if_valid(path, HangReport) for rank, path in sorted(found.items())}
    return {rank: report for rank, report in reports.items() if report}


def describe_hang(reports: Mapping[int, HangReport], hosts: Mapping[int, str]) -> str:
    """Describe which ranks hang and what they do, and where the others wait for them; `hosts` has all ranks."""
    if silent := [rank for rank in hosts if rank not in reports]:
        where = ", ".join(sorted({hosts[rank] for rank in silent}))
        return f"no report from {_listed('rank', silent)} on {where}{_others(reports, silent)}"
    told = list(reports.values())
    newest, numbers = max(each.step for each in told), [each.number for each in told if each.collective]
    is_one_group = len({each.collective.partition(" ")[2] for each in told if each.collective}) == 1
    tests: tuple[Callable[[HangReport], object], ...] = (
        lambda each: each.state,
        lambda each: each.step < newest,
        lambda each: each.phase == "batch" and not each.collective,
        lambda each: numbers and not each.collective,
        lambda each: is_one_group and each.number < max(numbers),
    )
    for is_cause in tests:
        causes = [rank for rank, each in reports.items() if is_cause(each)]
        if causes and len(causes) < len(reports):
            where = ", ".join(sorted({reports[rank].host for rank in causes}))
            return f"{_listed('rank', causes)} on {where}: {reports[causes[0]]}{_others(reports, causes)}"
    ranks_of: dict[str, list[int]] = {}
    for rank, each in reports.items():
        ranks_of.setdefault(each.collective, []).append(rank)
    parts = [f"{_listed('rank', ranks)}: {reports[ranks[0]]}" for ranks in ranks_of.values()]
    if len(parts) > 1:
        return f"ranks execute different code: {'; '.join(parts)}"
    return f"all ranks wait in the same place (the network?): {reports[min(reports)]}"


def _others(reports: Mapping[int, HangReport], causes: list[int]) -> str:
    waits: dict[str, list[int]] = {}
    for rank, each in reports.items():
        if rank not in causes:
            waits.setdefault(each.doing, []).append(rank)
    return "".join(f"; {_listed('rank', ranks)}: {what}" for what, ranks in waits.items())


def _listed(noun: str, numbers: Sequence[int]) -> str:
    """Format numbers with their noun: the first few, and how many more there are."""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {first_few(numbers)}"
