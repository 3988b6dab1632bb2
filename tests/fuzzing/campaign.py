"""Run many cases of each area in a process with limits, and count the results."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from fuzzing.area import CORPUS, Area, Case, read_case, write_case

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection

AREAS = {
    "specs": "fuzzing.specs:SPECS",
    "foreign": "fuzzing.foreign:FOREIGN",
    "runs": "fuzzing.run_folders:RUNS",
    "registry": "fuzzing.images:REGISTRY",
    "layers": "fuzzing.images:LAYERS",
    "image-files": "fuzzing.images:IMAGE_FILES",
    "data": "fuzzing.data_files:DATA",
    "checkpoints": "fuzzing.checkpoints:CHECKPOINTS",
}
"""Where each area is: those that aren't asked for are not imported."""

CPU_SECONDS = 30.0
"""Of one case: what takes longer hangs. CPU time, so that a busy machine is none."""
WAIT_SECONDS = 900.0
"""Of one case, by the clock: for what waits, or never comes back to Python."""
MEMORY_BYTES = 2 << 30
"""On top of what the libraries take."""
FILE_BYTES = 1 << 30

Outcome = Literal["accepted", "refused", "traceback", "hang"]


@dataclass(frozen=True)
class Report:
    """The result of a case; `text` is the traceback of one that failed."""

    number: int
    outcome: Outcome
    text: str
    peak_bytes: int


@dataclass
class Tally:
    """The results of the cases of an area."""

    area: str
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    peak_bytes: int = 0

    @property
    def num_failed(self) -> int:
        return self.outcomes["traceback"] + self.outcomes["hang"]


class HangError(BaseException):
    """A case takes too long. Not an `Exception`, so that no handler catches it."""


def load_area(name: str) -> Area:
    return _imported_area(AREAS[name])


def _imported_area(place: str) -> Area:
    module, _, attribute = place.partition(":")
    area: Area = getattr(importlib.import_module(module), attribute)
    return area


def make_case(area: Area, seed: int, number: int) -> Case:
    """Generate a case, which depends only on area, seed and number."""
    return area.make(random.Random(f"{area.name} {seed} {number}"))


@contextlib.contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Raise HangError in code that takes more CPU time."""

    def end(*_: object) -> NoReturn:
        raise HangError(f"more than {seconds:g} s of CPU time")

    earlier = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, earlier)


def try_case(area: Area, case: Case) -> tuple[Outcome, str]:
    """Run ftkit on a case in a new folder; return the result, with the traceback if it failed."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="ftkit-fuzz-", ignore_cleanup_errors=True) as folder:
        os.chdir(folder)
        try:
            with limited_time(CPU_SECONDS):
                return ("accepted" if area.run(case, Path(folder)) else "refused"), ""
        except HangError:
            return "hang", traceback.format_exc()
        except BaseException:  # noqa: BLE001 - SystemExit is a failure, too
            return "traceback", traceback.format_exc()
        finally:
            os.chdir(here)


def _work(place: str, seed: int, numbers: range, reports: Connection) -> None:
    """Run cases, and send a report for each."""
    logging.disable()
    area = _imported_area(place)
    make_case(area, seed, numbers.start)  # one-time setup does not count as time of the first case
    limit = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    for number in numbers:
        outcome, text = try_case(area, make_case(area, seed, number))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        reports.send(Report(number, outcome, text, peak))


def run_area(name: str, seed: int, numbers: range) -> Iterator[Report]:
    """Run cases of an area in a subprocess, which is restarted after a case that kills or hangs it."""
    context = multiprocessing.get_context("spawn")
    start = numbers.start
    while start < numbers.stop:
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(
            target=_work, args=(AREAS[name], seed, range(start, numbers.stop), sender), daemon=True
        )
        worker.start()
        sender.close()
        try:
            while start < numbers.stop:
                if not receiver.poll(WAIT_SECONDS):
                    yield Report(start, "hang", f"no answer in {WAIT_SECONDS:g} s", 0)
                    break
                report: Report = receiver.recv()
                yield report
                start = report.number + 1
        except EOFError:
            worker.join()
            yield Report(start, "traceback", f"the process ended with {worker.exitcode}", 0)
        finally:
            worker.kill()
            worker.join()
            receiver.close()
        start += 1


def main(words: Sequence[str] | None = None) -> int:
    """Run the campaign; return 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("areas", nargs="*", default=list(AREAS), help=f"of {', '.join(AREAS)}; all if none is given")
    parser.add_argument("--cases", type=int, default=500, help="number of cases of each area (500)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other cases (0)")
    parser.add_argument("--case", type=int, help="this case alone, with its traceback")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="where cases that fail are kept (tests/corpus)")
    given = parser.parse_args(words)
    if unknown := set(given.areas) - AREAS.keys():
        parser.error(f"there is no area {', '.join(sorted(unknown))}; there are {', '.join(AREAS)}")
    numbers = range(given.cases) if given.case is None else range(given.case, given.case + 1)
    tallies = [_count(name, given.seed, numbers, given.corpus) for name in given.areas]
    print(table(tallies, given.seed))
    return int(any(tally.num_failed for tally in tallies))


def _count(name: str, seed: int, numbers: range, corpus: Path) -> Tally:
    tally = Tally(name)
    for report in run_area(name, seed, numbers):
        tally.outcomes[report.outcome] += 1
        tally.peak_bytes = max(tally.peak_bytes, report.peak_bytes)
        if report.text:
            folder = corpus / name / f"seed-{seed}-case-{report.number}"
            shutil.rmtree(folder, ignore_errors=True)
            write_case(folder, make_case(load_area(name), seed, report.number))
            print(f"{report.text.rstrip()}\n{report.outcome}: kept in {folder}; again with", file=sys.stderr)
            print(f"  scripts/fuzz {name} --seed {seed} --case {report.number}\n", file=sys.stderr)
    return tally


def replay(area: Area, folder: Path) -> None:
    """Run ftkit on a case of the corpus.

    Raises:
        AssertionError: ftkit neither accepted nor rejected it.
    """
    outcome, text = try_case(area, read_case(folder))
    assert outcome in ("accepted", "refused"), text


def table(tallies: Sequence[Tally], seed: int) -> str:
    """Return the table that docs/reference/security.md shows."""
    lines = [f"seed {seed}", "", "| area | cases | accepted | refused | tracebacks | hangs | peak memory, MiB |"]
    lines.append("|---|---|---|---|---|---|---|")
    for tally in tallies:
        counts = [tally.outcomes[kind] for kind in ("accepted", "refused", "traceback", "hang")]
        cells = (tally.area, sum(counts), *counts, f"{tally.peak_bytes / 2**20:,.0f}")
        lines.append("| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else cell for cell in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
