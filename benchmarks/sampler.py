"""Benchmark what the sampler of GPUs costs: its own CPU time, and training steps with and without it.

    python benchmarks/sampler.py --case olmo3-7b-8layers [--gpus 1] [--rounds 6] [--seconds 30] [key=value …]

The first table is of the sampler alone, run as in a job with a short interval: seconds and CPU seconds of one sample of
all GPUs, and the fraction of one CPU at the interval of a run. The second table is of one training, on random weights
and tokens. In each round it takes steps for some seconds without a sampler, with one as in a run, and with one that
samples a hundred times as often; the order alternates. Columns: mean seconds of a step, and the cost relative to no
sampler with its standard error over the rounds; the last one is the cost for the rate of a run.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recording import record_repeats
from save_stall import case_parser, make_model, make_work, measure_in_processes

from ftkit.health.sampler import INTERVAL_SECONDS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ftkit.train.world import World

OFTEN = 100
COLUMNS = "{:<28} {:>8} {:>12} {:>10} {:>10} {:>12}"


@dataclass(frozen=True)
class Way:
    """A way to take steps: with a sampler at an interval in seconds, or without one."""

    title: str
    interval: float | None


WAYS = (
    Way("no sampler", None),
    Way(f"every {INTERVAL_SECONDS:g} s, as in a run", INTERVAL_SECONDS),
    Way(f"every {INTERVAL_SECONDS / OFTEN:g} s", INTERVAL_SECONDS / OFTEN),
)


def sampler(folder: Path, interval: float, *options: str) -> list[str]:
    """Return the command of the sampler."""
    arguments = [str(folder / "samples.jsonl"), f"--interval={interval}", *options]
    return [sys.executable, "-m", "ftkit.health.sampler", *arguments]


@contextmanager
def sampled(interval: float | None, folder: Path) -> Iterator[None]:
    """Run the sampler during the block, on one rank of the node."""
    if interval is None:
        yield
        return
    with subprocess.Popen(sampler(folder, interval)) as process:
        try:
            yield
        finally:
            process.kill()


def measure_sampler(folder: Path, num_samples: int) -> None:
    """Print what one sample costs: a long run of the sampler less one of a single sample, which is its start."""
    times = []
    for count in (1, 1 + num_samples):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(sampler(folder, 0.0, f"--count={count}"), check=True, stderr=subprocess.PIPE, text=True)
        if done.stderr:
            print(done.stderr.strip())
            return
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        times.append((time.perf_counter() - began, cpu))
    elapsed, cpu = ((long - short) / num_samples for short, long in zip(*times, strict=True))
    print(f"one sample: {1e3 * elapsed:.2f} ms, {1e3 * cpu:.2f} ms of CPU time (mean of {num_samples:,}); "
          f"every {INTERVAL_SECONDS:g} s: {cpu / INTERVAL_SECONDS:.4%} of one CPU; "
          f"start: {times[0][0]:.2f} s", flush=True)  # fmt: skip


def mean_step(work: Callable[[], None], world: World, duration: float) -> tuple[float, int]:
    """Take steps for some seconds; return the mean seconds of a step, and how many were taken by all ranks."""
    world.barrier()
    began, num_steps = time.perf_counter(), 0
    while True:
        work()
        num_steps += 1
        if num_steps % 10 == 0 and world.sum([float(time.perf_counter() - began > duration)])[0]:
            return (time.perf_counter() - began) / num_steps, num_steps


def measure_steps(work: Callable[[], None], world: World, options: argparse.Namespace) -> None:
    """Print the table of steps with and without the sampler."""
    mean_step(work, world, options.seconds / 2)
    seconds: dict[Way, list[float]] = {way: [] for way in WAYS}
    num_steps = dict.fromkeys(WAYS, 0)
    for number in range(options.rounds):
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            with sampled(way.interval if world.is_first else None, options.folder):
                taken = mean_step(work, world, options.seconds)
            seconds[way].append(taken[0])
            num_steps[way] += taken[1]
    if not world.is_first:
        return
    found = {}
    print(COLUMNS.format("sampler", "steps", "mean step, s", "cost", "± s. e.", "in a run"))
    for way in WAYS:
        costs = [with_it / without - 1 for with_it, without in zip(seconds[way], seconds[WAYS[0]], strict=True)]
        cost, error = statistics.mean(costs), statistics.stdev(costs) / len(costs) ** 0.5
        step = f"{statistics.mean(seconds[way]):.5f}"
        found[way.title] = {"mean step, s": seconds[way], "cost": costs}
        scaled = "" if way.interval is None else f"{cost * way.interval / INTERVAL_SECONDS:+.4%}"
        print(COLUMNS.format(way.title, num_steps[way], step, f"{cost:+.3%}", f"{error:.3%}", scaled), flush=True)
    record_repeats(options.record, "sampler", found)


def main() -> None:
    """Measure the sampler alone, then steps with and without it."""
    parser = case_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=30, help="seconds of steps in each round and way")
    parser.add_argument("--samples", type=int, default=500, help="samples taken to measure one")
    options = parser.parse_args()
    measure_in_processes(
        options,
        lambda plan, world: measure_steps(make_work(make_model(plan, world), plan, world), world, options),
        lambda folder: measure_sampler(folder, options.samples),
    )


if __name__ == "__main__":
    main()
