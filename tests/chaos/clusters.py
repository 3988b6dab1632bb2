"""Campaigns on several clusters at once, each in a process of its own."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from chaos.campaign import Campaign
from chaos.cluster import DEFAULT_STATE, DEFAULT_USER, MOST_NODES, DevCluster, SlurmSite

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chaos.campaign import Results


@contextmanager
def own_clusters(number: int | None, *options: str) -> Iterator[list[DevCluster]]:
    """Start clusters within the context, all at once; without a number, use the one that is up."""
    if number is None:
        yield [DevCluster()]
        return
    # Each in a folder of its own, which dev-cluster locks.
    clusters = [
        DevCluster(Path(f"{DEFAULT_STATE}-{each}") / f"c{each}", f"{DEFAULT_USER}-{each}") for each in range(number)
    ]
    with ThreadPoolExecutor(number) as threads:
        try:
            list(threads.map(lambda cluster: cluster.call("up", "--nodes", str(MOST_NODES), *options), clusters))
            yield clusters
        finally:
            list(threads.map(lambda cluster: cluster.call("down", check=False), clusters))
            for cluster in clusters:
                cluster.state.parent.rmdir()


@dataclass(frozen=True)
class Options:
    """Options of a campaign on one cluster; the deadline is by `time.time`."""

    seed: str
    name: str
    faults: int
    nodes: int
    steps: int
    deadline: float
    kinds: list[str]


def inject(cluster: DevCluster, options: Options) -> Results:
    """Run a campaign on a cluster."""
    with SlurmSite(options.nodes, options.steps, cluster) as site:
        deadline = options.deadline - time.time() + time.monotonic()
        campaign = Campaign(site, random.Random(options.seed), options.faults, deadline, options.name)
        try:
            campaign.run(options.kinds)
        except Exception as error:  # noqa: BLE001 - the faults before it count, and those of the other clusters
            campaign.results.wrong.append(f"{options.name}ended early: {error!r}")
    return campaign.results
