"""Inject faults into runs on the real Slurm of scripts/dev-cluster, and compare the results with an undisturbed run.

    scripts/dev-cluster up --nodes 3
    scripts/chaos [--faults N] [--minutes N] [--seed S] [--only KIND ...]     as root
    scripts/chaos --clusters 8 --faults 200     starts clusters of its own, and stops them at the end
    scripts/chaos --clusters 1 --record benchmarks/records && scripts/docs     docs/reference/faults.md

A run without faults is the reference. Then faults are injected into other runs while they train: processes, nodes,
daemons and the controller are killed, jobs are requeued and canceled, checkpoints are interrupted and damaged, the file
system is full or unreachable. The weights of each completed run must equal those of the reference bit for bit (within
1e-5 at other sizes), and so must the loss of every step, even if it was repeated: then each step had the correct packs,
and no incomplete checkpoint was loaded. Exit code 1 if anything differs. The seed determines all faults.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shlex
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from statistics import median

from chaos.campaign import Results
from chaos.cluster import ROOT, SlurmSite
from chaos.clusters import Options, inject, own_clusters


def main() -> int:
    """Run a campaign on each cluster."""
    parser = argparse.ArgumentParser(
        prog="scripts/chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = list(SlurmSite(0, 0).faults)
    parser.add_argument("--faults", type=int, default=200, help="number of faults (200)")
    parser.add_argument("--seed", type=int, default=None, help="seed of the faults; printed")
    parser.add_argument("--steps", type=int, default=1000, help="steps of each run (1000)")
    parser.add_argument("--nodes", type=int, default=2, help="nodes of each run, with one process each (2)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="inject no fault after this many minutes")
    parser.add_argument("--clusters", type=int, default=None, metavar="N", help="start N clusters, and use all at once")
    parser.add_argument("--cgroups", action="store_true", help="with --clusters: their Slurm uses cgroups")
    parser.add_argument("--only", nargs="*", choices=kinds, default=kinds, metavar="KIND")
    parser.add_argument(
        "--record", type=Path, metavar="DIR", help="add the results to the record faults-slurm.json there"
    )
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if asked.seed is None else asked.seed
    print(f"seed {seed}", flush=True)
    deadline = asked.minutes * 60 + time.time()
    results = Results()
    with (
        own_clusters(asked.clusters, *["--cgroups"] * asked.cgroups) as clusters,
        ProcessPoolExecutor(len(clusters), multiprocessing.get_context("spawn")) as processes,
    ):
        campaigns = []
        for number, cluster in enumerate(clusters):
            faults = (number + 1) * asked.faults // len(clusters) - number * asked.faults // len(clusters)
            name = f"{cluster.name}: " if asked.clusters else ""
            options = Options(f"{seed}, {number}", name, faults, asked.nodes, asked.steps, deadline, asked.only)
            campaigns.append(processes.submit(inject, cluster, options))
        try:
            for campaign in as_completed(campaigns):
                results.add(campaign.result())
        finally:
            print(f"\nseed {seed}\n{results.report()}", flush=True)
            if asked.record:
                record(asked.record, results)
    return int(not results.is_passed)


def record(folder: Path, results: Results) -> None:
    """Write the results by kind of fault; rows of other kinds in an existing record are kept."""
    sys.path.append(str(ROOT / "benchmarks"))
    from recording import Row, read_record, record_of, write_record

    rows = []
    for kind, tally in sorted(results.tallies.items()):
        measured = {
            "noticed": tally.noticed, "restarted": tally.restarted,
            "next step": [each for each in tally.seconds if each],  # after a restart
            "steps lost": [float(each) for each in tally.lost],
        }  # fmt: skip
        repeats = {key: values for key, values in measured.items() if values}
        medians: dict[str, float | str | None] = {key: median(values) for key, values in repeats.items()}
        medians |= {"faults": tally.faults, "reason": "; ".join(dict.fromkeys(tally.reasons))}
        rows.append(Row({"row": kind}, medians, repeats))
    path = folder / "faults-slurm.json"
    kept = (
        [each for each in read_record(path).rows if each.labels["row"] not in results.tallies] if path.exists() else []
    )
    made = record_of(sorted([*kept, *rows], key=lambda row: row.labels["row"]))
    command = shlex.join(["scripts/chaos", *sys.argv[1:]])
    write_record(folder, path.stem, replace(made, program="scripts/chaos", command=command))


if __name__ == "__main__":
    sys.exit(main())
