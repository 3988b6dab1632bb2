"""Which ranks of a hanging run the others wait for, in one line, from what each rank reports of itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ftkit.files import read_json_if_valid
from ftkit.runs.records import Count, Seconds

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout

_MAX_SHOWN = 8


@dataclass(frozen=True)
class HangReport:
    """What a rank does while a step takes far too long; or `state`, of a rank that does not report, by a neighbor.

    `collective` is the one it waits in, with the group in brackets, and `number` counts those of that group.
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
    """Describe which ranks the others wait for, what they do, and where the others wait; `hosts` has all ranks."""
    silent = [rank for rank in hosts if rank not in reports]
    if silent:
        where = ", ".join(sorted({hosts[rank] for rank in silent}))
        return f"no report from {_ranks(silent)} on {where}{_others(reports, silent)}"
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
            return f"{_ranks(causes)} on {where}: {reports[causes[0]]}{_others(reports, causes)}"
    ranks_of: dict[str, list[int]] = {}
    for rank, each in reports.items():
        ranks_of.setdefault(each.collective, []).append(rank)
    parts = [f"{_ranks(ranks)}: {reports[ranks[0]]}" for ranks in ranks_of.values()]
    if len(parts) > 1:
        return f"ranks execute different code: {'; '.join(parts)}"
    lowest = min(reports)
    return f"all ranks wait in the same place (the network?): {reports[lowest]}"


def _others(reports: Mapping[int, HangReport], causes: list[int]) -> str:
    waits: dict[str, list[int]] = {}
    for rank, each in reports.items():
        if rank not in causes:
            waits.setdefault(each.doing, []).append(rank)
    return "".join(f"; {_ranks(ranks)}: {what}" for what, ranks in waits.items())


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_SHOWN])) + (
        f" and {len(ranks) - _MAX_SHOWN} more" if len(ranks) > _MAX_SHOWN else ""
    )
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
