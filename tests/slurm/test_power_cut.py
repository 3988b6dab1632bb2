"""A node that loses its network: nothing is reset, and Slurm notices only minutes later."""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Cluster

MEASURED = os.environ.get("FTKIT_CUTS")
"""Variable with a file to which each test appends how many seconds it measured."""


def _keep(row: str, noticed: float, restarted: float, resumed: float) -> None:
    seconds = {"row": row, "s to the notice": noticed, "s to new processes": restarted, "s to the next step": resumed}
    if MEASURED:
        with Path(MEASURED).open("a", encoding="utf-8") as file:
            file.write(json.dumps(seconds) + "\n")


@contextmanager
def canceled_at_its_end(cluster: Cluster, run: str) -> Iterator[None]:
    """Cancel a run after the block: with Slurm's default time-outs, its nodes would be taken for half a minute."""
    try:
        yield
    finally:
        cluster.ftkit("cancel", run)


@pytest.mark.parametrize("victim", ["n2"])
def test_training_goes_on_within_two_minutes_on_a_spare_node(cluster: Cluster, victim: str) -> None:
    run = cluster.submit_endless(
        f"cut-{victim}-{time.time():.0f}", "training.checkpoint_every_steps=5", "resources.spare_nodes=1",
        "resources.preflight=false",
    )  # fmt: skip
    cluster.wait_for_step(run, 12)
    link = ("node", victim, "--", "ip", "link", "set", "eth0")
    with canceled_at_its_end(cluster, run), cluster.default_timeouts():
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
    _keep("link cut, a spare node", noticed - cut, restarted - cut, resumed - cut)
    assert noticed - cut < 20
    assert restarted - cut < 60
    assert resumed - cut < 120


def test_the_job_is_requeued_without_the_node_of_its_script_once_slurm_notices(cluster: Cluster) -> None:
    run = cluster.submit_endless(
        f"first-{time.time():.0f}", "training.checkpoint_every_steps=5", "resources.spare_nodes=1",
        "resources.preflight=false",
    )  # fmt: skip
    cluster.wait_for_step(run, 12)
    victim = cluster.nodes(cluster.job(run))[0]
    link = ("node", victim, "--", "ip", "link", "set", "eth0")
    with canceled_at_its_end(cluster, run), cluster.default_timeouts() if MEASURED else nullcontext():
        cluster.switch(*link, "down")
        cut = time.time()
        try:
            silent = cluster.folder(run) / "silent" / victim
            cluster._wait(run, lambda: silent.exists() or cluster.count_starts(run) > 1)
            noticed = time.time()
            if MEASURED:
                assert list(cluster.status(run)["silent_nodes"]) == [victim]
            cluster.start_again(run, 1)
            cluster._wait(run, lambda: cluster.count_starts(run) > 1)
            restarted = time.time()
            cluster.wait_for_step(run, 11, start=1)
            resumed = time.time()
            assert victim not in cluster.nodes(cluster.job(run))
        finally:
            cluster.switch(*link, "up")
    _keep("link of the script's node cut", noticed - cut, restarted - cut, resumed - cut)


def test_training_goes_on_with_the_same_data_on_the_nodes_that_are_left(cluster: Cluster) -> None:
    run = cluster.submit_endless(
        f"left-{time.time():.0f}", "--nodes", "3", "training.checkpoint_every_steps=5", "resources.min_nodes=2",
        "resources.preflight=false", "training.global_batch_size=12",
    )  # fmt: skip
    cluster.wait_for_step(run, 12)
    job = cluster.job(run)
    victim = cluster.nodes(job)[-1]
    with canceled_at_its_end(cluster, run), cluster.default_timeouts():
        cluster.switch("kill-node", victim)
        cut = time.time()
        try:
            cluster.wait_for_log(run, f"node {victim} no longer answers")
            noticed = time.time()
            newest = cluster.records(run, "step")[-1]["step"]
            cluster._wait(run, lambda: len(cluster.records(run, "start")) > 1)
            restarted = time.time()
            cluster.wait_for_step(run, newest + 2, start=1)
            resumed = time.time()
            assert cluster.slurm_state(job) == "RUNNING"
        finally:
            cluster.switch("revive-node", victim)
    _keep("power cut, `min_nodes`", noticed - cut, restarted - cut, resumed - cut)
    first, again = cluster.records(run, "start")
    assert (first["world_size"], again["world_size"]) == (3, 2)
    assert again["resumed_from"] % 5 == 0
    steps = cluster.records(run, "step")
    before = {each["step"]: each for each in steps if each["time"] < again["time"]}
    after = {each["step"]: each for each in steps if each["time"] > again["time"]}
    assert min(after) == again["resumed_from"] + 1
    for step in before.keys() & after.keys():  # the same packs, in sums of another order
        assert after[step]["tokens"] == before[step]["tokens"]
        assert after[step]["loss"] == pytest.approx(before[step]["loss"], rel=1e-3)
    assert cluster.status(run)["restarts"][-1]["reason"]["cause"] == "node-failure"
