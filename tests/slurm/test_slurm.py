"""User workflows on a real Slurm cluster."""

from __future__ import annotations

import json
import re
from random import Random
from typing import TYPE_CHECKING

import pytest
from chaos.cluster import DevCluster, SlurmRun
from chaos.slurm_faults import starve_rank
from waiting import wait_until

from ftkit.config.context import Context
from ftkit.config.load import load_recipe
from ftkit.models.config_json import CONFIG_KEYS

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Cluster


@pytest.fixture(scope="module")
def followed(cluster: Cluster) -> str:
    """A run on two nodes whose log was followed to its end."""
    run = cluster.submit("followed", "--processes-per-node", "2", "training.global_batch_size=16")
    log = cluster.ftkit("logs", run, "-f").stdout
    assert "step 20/20" in log
    assert "completed after 20 steps" in log
    return run


def test_a_followed_run_trains_on_two_nodes_and_exports_a_model(cluster: Cluster, followed: str) -> None:
    status = cluster.status(followed)
    assert (status["state"], status["world_size"], status["start"]["world_size"]) == ("completed", 4, 4)
    log = cluster.ftkit("logs", followed).stdout
    assert "n[1-2]" in log
    assert "rank 0 INFO" in log
    assert "rank 3 INFO" in cluster.ftkit("logs", followed, "--rank", "3").stdout
    found = cluster.execute("find", status["end"]["export"], "-name", "model.safetensors")
    assert found.stdout.strip().endswith("export/model.safetensors")
    assert "followed" in cluster.ftkit("runs").stdout


def test_a_slurm_run_is_repeated_on_another_cluster_with_another_size(cluster: Cluster, followed: str) -> None:
    told = cluster.ftkit("rerun", followed, "--cluster", "local", "--processes-per-node", "1", "--name", "elsewhere")
    for difference in ("name is local, was dev", "num_nodes is 1, was 2", "processes_per_node is 1, was 2"):
        assert f"warning: cluster: {difference}" in told.stderr
    assert "2 packs × 1 process × 8 accumulation = 16 packs" in told.stderr
    assert re.search(rf"repeated: losses differ from those of {followed} from step \d+ on", told.stdout)
    assert "on devices of another kind or number (20 records)" in told.stdout
    assert "cluster: scheduler" in told.stdout


def test_a_failing_rank_is_reported_with_the_same_reason_everywhere(cluster: Cluster, shared_folder: Path) -> None:
    # A configuration without weights, which only the ranks detect.
    shape = load_recipe("tests/train/tiny.yaml", Context.here()).model.architecture.model_dump(exclude_none=True)
    config = {"model_type": "qwen3"} | {key: value for key, value in shape.items() if key in CONFIG_KEYS}
    (shared_folder / "config.json").write_text(json.dumps(config))
    (shared_folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")  # no tensors
    arguments = ("run", "tests/train/tiny.yaml", "--cluster", "dev", "--processes-per-node", "1", "--name", "failing")
    done = cluster.ftkit(*arguments, f"model.weights={shared_folder}", expect=9)
    assert "of the model's parameters are not in" in done.stderr
    shown = cluster.ftkit("status", "failing").stdout
    assert "TrainingError" in shown
    assert "of the model's parameters are not in" in shown
    assert "Traceback" not in shown
    assert cluster.status("failing")["state"] == "failed"


def test_missing_weights_are_rejected_before_submission(cluster: Cluster) -> None:
    refused = cluster.ftkit("run", "tests/train/tiny.yaml", "--cluster", "dev", "model.weights=/etc", expect=4)
    assert "/etc has no config.json" in refused.stderr


def test_weights_that_may_exist_only_on_nodes_are_checked_by_the_first_stage(cluster: Cluster) -> None:
    arguments = ("run", "tests/train/tiny.yaml", "--cluster", "dev", "--name", "unseen")
    done = cluster.ftkit(*arguments, "model.weights=/mnt/localssd/model", expect=4)
    assert "not visible from here, nor is /mnt/localssd" in done.stderr
    assert "there is no folder /mnt/localssd/model on n" in done.stderr
    assert cluster.status("unseen")["start"] is None


def test_a_rejection_by_slurm_is_explained(cluster: Cluster) -> None:
    cluster.execute(
        "sh", "-c", "printf 'extends: dev\\nname: wrong\\npartition: nope\\n' >~/.config/ftkit/clusters/wrong.yaml"
    )
    done = cluster.ftkit("run", "tests/train/tiny.yaml", "--cluster", "wrong", expect=6)
    assert "nope" in done.stderr
    assert "partition" in done.stderr


def test_a_workspace_with_an_unusual_name_works(cluster: Cluster) -> None:
    settings = json.loads(cluster.ftkit("config", "--json").stdout)["settings"]
    script = """
    export FTKIT_WORKSPACE="$0/it's 100% \\"\\$(odd)\\" ;&"
    mkdir -p "$FTKIT_WORKSPACE"
    exec ftkit run tests/train/tiny.yaml --cluster dev --processes-per-node 1 training.max_steps=2
    """
    done = cluster.execute("bash", "-c", script, settings["workspace"]["value"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2/2" in done.stderr


# The tests below share one run, in this order: each leaves it training. `scripts/chaos` has more faults.


@pytest.fixture(scope="module")
def long_run(cluster: Cluster) -> str:
    run = cluster.submit_endless("long", "training.checkpoint_every_steps=1000000")
    cluster.wait_for_step(run, 1)
    return run


def test_a_second_job_in_a_run_folder_is_rejected_and_the_first_continues(cluster: Cluster, long_run: str) -> None:
    cluster.ftkit("resume", long_run, "--no-follow", expect=6)
    folder, job = cluster.folder(long_run), cluster.job(long_run)
    second = cluster.execute("sbatch", "--parsable", f"--chdir={folder}", f"{folder}/job.sbatch").stdout.strip()
    cluster.wait_for_log(long_run, f"another process is training in this run's folder: job {job}, process")
    wait_until(lambda: cluster.slurm_state(second) == "FAILED")
    cluster.wait_for_step(long_run, cluster.wait_for_step(long_run, 1) + 1)


# Preemption sends SIGTERM to the tasks.
@pytest.mark.parametrize("how", ["SIGUSR1", "preemption"])
def test_a_stopped_run_writes_a_checkpoint_and_resumes_later(cluster: Cluster, long_run: str, how: str) -> None:
    num_starts = len(cluster.records(long_run, "start"))
    before = cluster.wait_for_step(long_run, 1, start=num_starts - 1)
    if how == "preemption":
        cluster.preempt(long_run, "--partition=urgent")
    else:
        starts = cluster.count_starts(long_run)
        assert cluster.execute("scancel", f"--signal={how}", cluster.job(long_run)).returncode == 0
        cluster.start_again(long_run, starts)
    cluster.wait_for_step(long_run, before, start=num_starts)
    assert cluster.records(long_run, "start")[-1]["resumed_from"] >= before


def test_a_run_that_lost_a_node_is_requeued_with_slurms_default_timeouts(cluster: Cluster, long_run: str) -> None:
    num_starts = len(cluster.records(long_run, "start"))
    resumed_from = cluster.records(long_run, "start")[-1]["resumed_from"]
    starts = cluster.count_starts(long_run)
    with cluster.default_timeouts():
        victim = cluster.nodes(cluster.job(long_run))[-1]
        cluster.switch("kill-node", victim)
        try:
            cluster.wait_for_log(long_run, "waiting for Slurm to notice (SlurmdTimeout is 300 s)")
            assert cluster.status(long_run)["state"] == "running"
            cluster.declare_dead(victim)
            cluster.start_again(long_run, starts)
        finally:
            cluster.switch("revive-node", victim)
    cluster.wait_for_step(long_run, resumed_from + 1, start=num_starts)
    assert cluster.records(long_run, "start")[-1]["resumed_from"] == resumed_from
    causes = [each["reason"]["cause"] for each in cluster.status(long_run)["restarts"]]
    assert causes == ["stop-request", "preempted", "node-failure"]


def test_a_controller_outage_burns_no_restart(cluster: Cluster, long_run: str) -> None:
    num_starts = len(cluster.records(long_run, "start"))
    resumed_from = cluster.records(long_run, "start")[-1]["resumed_from"]
    victim = cluster.nodes(cluster.job(long_run))[-1]
    # From some version on, srun itself waits for the controller after its tasks have ended.
    srun_waits = cluster.slurm_version >= (26, 5)
    cluster.switch("kill-controller")
    try:
        if cluster.has_cgroups:
            starve_rank(SlurmRun(cluster.folder(long_run), 0, DevCluster()), Random(0))
        else:
            cluster.kill(victim, "python[^ ]* -u -m ftkit.train ")
        cluster.wait_for_log(long_run, "Signal 9" if srun_waits else "asking again in 20 s")
        shown = cluster.status(long_run)
    finally:
        cluster.switch("revive-controller")
    if srun_waits:
        assert (shown["state"], shown["reason"].partition(":")[0]) == ("unknown", "Slurm did not report job states")
    else:
        assert shown["state"] == "running"
        assert shown["reason"].startswith("waiting for Slurm's controller since 20")
    cluster.wait_for_step(long_run, resumed_from + 1, start=num_starts)
    start = cluster.records(long_run, "start")[-1]
    assert start["resumed_from"] == resumed_from
    status = cluster.status(long_run)
    cause = "out-of-memory" if cluster.has_cgroups else "killed"
    assert (status["state"], status["reason"], status["restarts"][-1]["reason"]["cause"]) == ("running", "", cause)
    assert "restart 2 of" not in cluster.wait_for_log(long_run, "restart 1 of at most")


def test_a_preemption_without_grace_time_is_known_where_nodes_do_not_reach_the_accounting(
    cluster: Cluster, long_run: str
) -> None:
    num_starts = len(cluster.records(long_run, "start"))
    before = cluster.wait_for_step(long_run, 1, start=num_starts - 1)
    with cluster.preemption_by_qos():
        cluster.preempt(long_run, "--qos=urgent")
        cluster.wait_for_step(long_run, before, start=num_starts)
    assert cluster.status(long_run)["restarts"][-1]["reason"] == {"cause": "preempted", "detail": ""}


def test_a_canceled_run_ends_and_is_not_requeued(cluster: Cluster, long_run: str) -> None:
    job = cluster.job(long_run)
    cluster.ftkit("cancel", job)
    assert cluster.wait_for_end(long_run)["state"] == "canceled"
    queue = cluster.execute("squeue", "--noheader", "--jobs", job, "--states=PENDING,RUNNING").stdout
    assert queue == ""
