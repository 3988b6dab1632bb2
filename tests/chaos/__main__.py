"""Inject faults into runs on the real Slurm of scripts/dev-cluster, and compare the results with an undisturbed run.

    scripts/dev-cluster up --nodes 3
    scripts/chaos [--faults N] [--minutes N] [--seed S] [--only KIND ...]     as root

A run without faults is the reference. Then faults are injected into other runs while they train: processes, nodes and
daemons are killed, jobs are requeued and cancelled, checkpoints are interrupted and damaged, the file system is full or
unreachable. The weights of each completed run must equal those of the reference bit for bit (within 1e-5 at other
sizes), and so must the loss of every step, even if it was repeated: then each step had the correct packs, and no
incomplete checkpoint was loaded. Exit code 1 if anything differs. The seed determines all faults.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from chaos.campaign import Campaign
from chaos.cluster import SlurmSite


def main() -> int:
    """Run a campaign on the cluster."""
    parser = argparse.ArgumentParser(
        prog="scripts/chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = list(SlurmSite(0, 0).faults)
    parser.add_argument("--faults", type=int, default=200, help="number of faults (200)")
    parser.add_argument("--seed", type=int, default=None, help="seed of the faults; printed")
    parser.add_argument("--steps", type=int, default=1000, help="steps of each run (1000)")
    parser.add_argument("--nodes", type=int, default=2, help="nodes of each run, with one process each (2)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="inject no fault after this many minutes")
    parser.add_argument("--only", nargs="*", choices=kinds, default=kinds, metavar="KIND")
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if asked.seed is None else asked.seed
    print(f"seed {seed}", flush=True)
    with SlurmSite(asked.nodes, asked.steps) as site:
        campaign = Campaign(site, random.Random(seed), asked.faults, asked.minutes * 60 + time.monotonic())
        try:
            campaign.run(asked.only)
        finally:
            print(f"\nseed {seed}\n{campaign.report()}", flush=True)
    print("\n".join(campaign.wrong) or "all runs are equal to the reference")
    return int(not campaign.is_passed)


if __name__ == "__main__":
    sys.exit(main())
