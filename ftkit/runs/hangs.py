"""Which ranks of a hanging run the others wait for, in one line, from what each rank reports of itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
    def waits_in(self) -> str:
        return f"{self.collective} {self.number}" if self.collective else ""

    def __str__(self) -> str:
        what = self.state or (f"waits in {self.waits_in}" if self.waits_in else f"is at {self.place}")
        phase = {"after": "after step", "batch": "loading the batch of step"}.get(self.phase, f"{self.phase} of step")
        return f"{what}, {phase} {self.step}, since {datetime.fromtimestamp(self.since, UTC):%H:%M:%S} UTC"


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
    same_group = len({each.collective.partition(" ")[2] for each in told if each.collective}) == 1
    for is_culprit in (
        lambda each: each.state,
        lambda each: each.step < newest or (each.step == newest and each.phase != "after" and _is_after(told)),
        lambda each: each.phase == "batch" and not each.collective,
        lambda each: numbers and not each.collective,
        lambda each: same_group and each.collective and each.number < max(numbers),
    ):
        culprits = [rank for rank, each in reports.items() if is_culprit(each)]
        if culprits and len(culprits) < len(reports):
            first = reports[culprits[0]]
            return f"{_ranks(culprits)} on {first.host} {first}{_others(reports, culprits)}"
    if len(names := {each.collective for each in told}) > 1:
        return "ranks execute different code: " + "; ".join(
            f"{_ranks([rank for rank, each in reports.items() if each.collective == name])} "
            f"{next(each for each in told if each.collective == name)}"
            for name in sorted(names)
        )
    lowest = min(reports)
    return f"all ranks wait in the same place (the network?): rank {lowest} on {reports[lowest].host} {reports[lowest]}"


def _is_after(told: Iterable[HangReport]) -> bool:
    return any(each.phase == "after" for each in told)


def _others(reports: Mapping[int, HangReport], culprits: list[int]) -> str:
    waits: dict[str, list[int]] = {}
    for rank, each in reports.items():
        if rank not in culprits:
            waits.setdefault(f"waits in {each.waits_in}" if each.waits_in else f"is at {each.place}", []).append(rank)
    return "".join(f"; {_ranks(ranks)} {what}" for what, ranks in waits.items())


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_SHOWN])) + (
        f" and {len(ranks) - _MAX_SHOWN} more" if len(ranks) > _MAX_SHOWN else ""
    )
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
