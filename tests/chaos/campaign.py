"""Inject faults into runs, one after another, and compare the runs with an undisturbed one."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count, cycle
from random import Random
from typing import TYPE_CHECKING, Any, TextIO

from chaos.runs import Run, Site, differences, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

MARGIN = 24
"""Last steps of a run without faults, since a run fails if its last checkpoint can't be written."""
RESIZED = "resumed at another size"
"""A run with this fault has no others, and is compared with a tolerance."""
RELEASED = ", and Slurm held the job until `scontrol release`"
TOLERANCE = 1e-5


@dataclass
class Tally:
    """Results of the faults of one kind, after each that the run survived.

    Attributes:
        faults: number of those injected.
        lost: steps that were trained again.
        noticed: seconds until the job script logged something; only after a restart.
        restarted: seconds until the processes had loaded the checkpoint; only after a restart.
        seconds: until the next step; 0 without a restart.
        reasons: why training restarted, as `ftkit status` shows it.
    """

    faults: int = 0
    lost: list[int] = field(default_factory=list)
    noticed: list[float] = field(default_factory=list)
    restarted: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


@dataclass
class Results:
    """Results of one campaign or of several.

    Attributes:
        tallies: by kind of fault.
        wrong: differences from the undisturbed run, and why a campaign ended early.
        num_equal: completed runs that equal the undisturbed one.
    """

    tallies: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    wrong: list[str] = field(default_factory=list)
    num_equal: int = 0

    @property
    def num_faults(self) -> int:
        return sum(tally.faults for tally in self.tallies.values())

    @property
    def is_passed(self) -> bool:
        """Whether the runs survived all faults and equal the undisturbed one."""
        return not self.wrong and all(len(tally.lost) == tally.faults for tally in self.tallies.values())

    def add(self, others: Results) -> None:
        """Add the results of another campaign."""
        for kind, theirs in others.tallies.items():
            tally = self.tallies[kind]
            tally.faults += theirs.faults
            for name in ("lost", "noticed", "restarted", "seconds", "reasons"):
                getattr(tally, name).extend(getattr(theirs, name))
        self.wrong += others.wrong
        self.num_equal += others.num_equal

    def report(self) -> str:
        """Return a table."""
        lines = [
            "| fault | faults | survived | steps lost (mean, most) | s to the next step (median, most) |",
            "|---|---|---|---|---|",
        ]
        for kind, tally in sorted(self.tallies.items()):
            lost, seconds = tally.lost or [0], sorted(tally.seconds) or [0.0]
            lines.append(
                f"| {kind} | {tally.faults} | {len(tally.lost)} | {sum(lost) / len(lost):.1f}, {max(lost)} "
                f"| {seconds[len(seconds) // 2]:.0f}, {seconds[-1]:.0f} |"
            )
        survived = sum(len(tally.lost) for tally in self.tallies.values())
        verdict = f"{self.num_equal} completed runs equal their reference, {len(self.wrong)} differences"
        return "\n".join([*lines, f"| all | {self.num_faults} | {survived} | | |", "", verdict, *self.wrong])


def shuffled_forever(kinds: list[str], chance: Random) -> Iterator[str]:
    """Yield all kinds in random order, again and again."""
    while True:
        yield from chance.sample(kinds, len(kinds))


@dataclass
class Campaign:
    """Faults on runs at a site.

    Attributes:
        site: where the runs train.
        chance: determines the faults and their steps.
        num_faults: limit of their number.
        deadline: no fault is injected later, by `time.monotonic`.
        name: precedes each line of the output.
        output: gets a line for each fault.
        results: of the faults so far.
    """

    site: Site
    chance: Random
    num_faults: int
    deadline: float = float("inf")
    name: str = ""
    output: TextIO = sys.stdout
    results: Results = field(default_factory=Results)

    @property
    def is_enough(self) -> bool:
        return self.results.num_faults >= self.num_faults or time.monotonic() > self.deadline

    def run(self, kinds: list[str]) -> None:
        """Train the reference, and other runs with faults of these kinds until the limit is reached."""
        reference = self.site.start("reference")
        wait_for(reference, lambda: reference.is_completed() or reference.is_over())
        same_size = [kind for kind in kinds if kind != RESIZED]
        groups = ((same_size, 0.0), ([RESIZED] if RESIZED in kinds else [], TOLERANCE))
        sources = cycle([(shuffled_forever(group, self.chance), tolerance) for group, tolerance in groups if group])
        for number in count(1):
            if self.is_enough:
                break
            source, tolerance = next(sources)
            run = self.site.start(f"disturbed-{number}")
            try:
                self._disturb_until_completed(run, source)
            except Exception as error:  # noqa: BLE001 - the faults before it count, and other runs follow
                lost = f"{run.folder.name}: given up, see {self.site.abandon(run)}: {error!r}"
                self.results.wrong.append(self.name + lost)
                self._tell(lost)
                continue
            found = differences(run, reference, tolerance=tolerance)
            self.results.wrong += [f"{self.name}{run.folder.name}: {each}" for each in found]
            self.results.num_equal += not found
            self._tell(f"{run.folder.name}: {'; '.join(found) or 'equal to the reference'}")

    def _disturb_until_completed(self, run: Run, kinds: Iterator[str]) -> None:
        while not run.is_completed():
            # At a later step than before: a run gives up if the same failure repeats at the same step.
            reached = max((record["step"] for record in run.records("step")), default=0)
            self._wait_for_step(run, reached + self.chance.randint(2, 14))
            self.site.repair()
            if run.is_completed() or self.is_enough or run.step() > run.num_steps - MARGIN:
                break
            self._disturb(run, next(kinds))
        wait_for(run, lambda: run.is_completed() or run.is_over())
        if not run.is_completed():
            self.site.resume(run)
            wait_for(run, run.is_completed)

    def _wait_for_step(self, run: Run, step: int) -> None:
        wait_for(run, lambda: run.step() >= step or run.is_completed() or run.is_over())

    def _disturb(self, run: Run, kind: str) -> None:
        """Inject a fault into a run; wait until it trains again."""
        before, begun, num_starts = run.step(), time.time(), len(run.records("start"))
        self._tell(f"{time.strftime('%H:%M:%S')}  {run.folder.name}  step {before:4}  {kind}")
        tally, num_releases = self.results.tallies[kind], run.num_releases
        tally.faults += 1
        self.site.faults[kind](run, self.chance)
        before = max(before, run.step()) if len(run.records("start")) == num_starts else before
        found: list[dict[str, Any]] = []

        def is_decided() -> bool:
            found[:] = _steps_since(run, num_starts, begun, before)
            return bool(found) or run.is_completed() or run.is_over()

        wait_for(run, is_decided)
        if run.num_releases > num_releases:  # a row of its own
            tally.faults -= 1
            tally = self.results.tallies[kind + RELEASED]
            tally.faults += 1
        if not found and not run.is_completed():
            self._tell(f"          not survived: {run.output()}")
            self.site.resume(run)
            wait_for(run, lambda: len(run.records("start")) > num_starts)
            return
        resumed = run.records("start")[num_starts:]
        has_lost = bool(resumed and found)
        tally.lost.append(max(0, before - resumed[0]["resumed_from"]) if has_lost else 0)
        tally.seconds.append(found[0]["time"] - begun if has_lost else 0.0)
        if has_lost:
            tally.restarted.append(resumed[0]["time"] - begun)
            tally.noticed += run.seconds_to_notice(begun)
            tally.reasons += run.restart_reasons()[-1:]

    def _tell(self, line: str) -> None:
        print(self.name + line, file=self.output, flush=True)


def _steps_since(run: Run, num_starts: int, begun: float, before: int) -> list[dict[str, Any]]:
    """Return the steps after a fault; without a restart, the run has survived if it takes ten more steps."""
    resumed = run.records("start")[num_starts:]
    since = resumed[0]["time"] if resumed else begun
    return [each for each in run.records("step") if each["time"] > since and (resumed or each["step"] > before + 9)]
