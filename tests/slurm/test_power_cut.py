"""A node that loses its network: nothing is reset, and Slurm notices only minutes later."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Cluster

MEASURED = os.environ.get("FTKIT_CUTS")
"""Variable with a file to which each test appends how many seconds it measured."""


@pytest.mark.parametrize("victim", ["n2"])
def test_training_goes_on_within_two_minutes_on_a_spare_node(cluster: Cluster, victim: str) -> None:
    run = cluster.submit(
        f"cut-{victim}-{time.time():.0f}", "training.max_steps=1000000", "training.checkpoint_every_steps=5",
        "training.log_every_steps=1", "evaluation.generation=null", "resources.spare_nodes=1",
        "resources.preflight=false",
    )  # fmt: skip
    cluster.wait_for_step(run, 12)
    link = ("node", victim, "--", "ip", "link", "set", "eth0")
    with cluster.default_timeouts():
        cluster.switch(*link, "down")
        cut = time.time()
        try:
            silent = cluster.folder(run) / "silent" / victim
            cluster._wait(run, silent.exists)
            noticed = silent.stat().st_mtime
            status = cluster.status(run)
            assert list(status["silent_nodes"]) == [victim]
            cluster.wait_for_log(run, f"node {victim} no longer answers")
            log = cluster.folder(run) / "logs" / "job.log"
            cluster._wait(run, lambda: log.read_text().count("ftkit: training on") > 1)
            restarted = time.time()
            cluster.wait_for_step(run, 11, start=1)
            resumed = time.time()
            assert victim not in log.read_text().rpartition("ftkit: training on")[2].splitlines()[0]
        finally:
            cluster.switch(*link, "up")
            cluster.ftkit("cancel", run)
    seconds = {"victim": victim, "noticed": noticed - cut, "restarted": restarted - cut, "resumed": resumed - cut}
    if MEASURED:
        with Path(MEASURED).open("a", encoding="utf-8") as file:
            file.write(json.dumps(seconds) + "\n")
    assert noticed - cut < 20
    assert restarted - cut < 60
    assert resumed - cut < 120
