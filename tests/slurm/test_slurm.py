"""The work of users on a cluster, on a real Slurm."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from waiting import wait_until

from ftkit.config.context import Context
from ftkit.config.load import load_recipe
from ftkit.config.model_config import CONFIG_KEYS

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Cluster

# Four processes, and enough steps that there is time to disturb them.
FOUR = "training.global_batch_size=16"
LONG = (FOUR, "training.max_steps=3000", "training.checkpoint_every_steps=20", "evaluation.sql_execution=null")


def is_training(status: dict[str, Any]) -> bool:
    return status["last_step"] is not None and status["last_step"]["step"] > 25


@pytest.fixture(scope="module")
def followed(cluster: Cluster) -> str:
    """A run over two nodes that was followed to its end."""
    done = cluster.ftkit("run", "tests/train/tiny.yaml", "--cluster", "dev", "--nodes", "2", FOUR)
    assert "step 20/20" in done.stderr
    return str(cluster.status("last")["id"])


def test_a_followed_run_trains_over_two_nodes_and_ends_with_a_model(cluster: Cluster, followed: str) -> None:
    status = cluster.status(followed)
    assert (status["state"], status["world_size"], status["start"]["world_size"]) == ("completed", 4, 4)
    log = cluster.ftkit("logs", followed).stdout
    assert "n[1-2]" in log
    assert "rank 0 INFO" in log
    assert "rank 3 INFO" in cluster.ftkit("logs", followed, "--rank", "3").stdout
    found = cluster.execute("find", status["end"]["export"], "-name", "model.safetensors")
    assert found.stdout.strip().endswith("export/model.safetensors")
    assert "tiny" in cluster.ftkit("runs").stdout


def test_a_run_of_slurm_is_repeated_on_another_cluster_of_another_size(cluster: Cluster, followed: str) -> None:
    told = cluster.ftkit("rerun", followed, "--cluster", "local", "--gpus-per-node", "1", "--name", "elsewhere")
    for difference in ("name is local, was dev", "num_nodes is 1, was 2", "processes_per_node is 1, was 2"):
        assert f"warning: cluster: {difference}" in told.stderr
    assert "2 packs × 1 process × 8 accumulation = 16 packs" in told.stderr
    assert re.search(rf"repeated: losses differ from those of {followed} from step \d+ on", told.stdout)
    assert "on devices of another kind or number (20 records)" in told.stdout
    assert "cluster: scheduler" in told.stdout


def test_a_cancelled_run_ends_and_is_not_put_back_into_the_queue(cluster: Cluster) -> None:
    run = cluster.submit("cancelled", *LONG)
    job = cluster.wait(run, is_training)["job_id"]
    cluster.ftkit("cancel", job)
    status = cluster.wait(run, lambda status: status["is_final"])
    assert status["state"] == "cancelled"
    queue = cluster.execute("squeue", "--noheader", "--jobs", job, "--states=PENDING,RUNNING").stdout
    assert queue == ""


def test_the_log_is_followed_to_the_end_of_the_run(cluster: Cluster) -> None:
    run = cluster.submit("followed", FOUR)
    log = cluster.ftkit("logs", run, "-f").stdout
    assert "step 20/20" in log
    assert "completed after 20 steps" in log


def test_a_failing_rank_is_shown_with_its_reason_as_the_run_showed_it(cluster: Cluster, shared_folder: Path) -> None:
    # A model's configuration without its tensors, which only the ranks find out.
    shape = load_recipe("tests/train/tiny.yaml", Context.here()).model.architecture.model_dump(exclude_none=True)
    config = {"model_type": "qwen3"} | {key: value for key, value in shape.items() if key in CONFIG_KEYS}
    (shared_folder / "config.json").write_text(json.dumps(config))
    (shared_folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")  # no tensors
    arguments = ("run", "tests/train/tiny.yaml", "--cluster", "dev", "--nodes", "2", "--name", "failing", FOUR)
    done = cluster.ftkit(*arguments, f"model.weights={shared_folder}", expect=9)
    assert "of the model's parameters are not in" in done.stderr
    shown = cluster.ftkit("status", "failing").stdout
    assert "TrainingError" in shown
    assert "of the model's parameters are not in" in shown
    assert "Traceback" not in shown
    assert cluster.status("failing")["state"] == "failed"


def test_weights_that_are_missing_are_refused_before_anything_is_submitted(cluster: Cluster) -> None:
    refused = cluster.ftkit("run", "tests/train/tiny.yaml", "--cluster", "dev", "model.weights=/etc", expect=4)
    assert "/etc has no config.json" in refused.stderr


def test_weights_that_only_the_nodes_could_have_are_looked_for_by_the_first_stage(cluster: Cluster) -> None:
    arguments = ("run", "tests/train/tiny.yaml", "--cluster", "dev", "--name", "unseen")
    done = cluster.ftkit(*arguments, "model.weights=/mnt/localssd/model", expect=4)
    assert "not to be seen from here, nor is /mnt/localssd" in done.stderr
    assert "there is no folder /mnt/localssd/model on n" in done.stderr
    assert cluster.status("unseen")["start"] is None


def test_a_run_survives_the_death_of_all_processes_of_a_node_and_of_the_node(cluster: Cluster) -> None:
    run = cluster.submit("survivor", *LONG, "training.max_steps=150")
    job = cluster.wait(run, is_training)["job_id"]
    victim = cluster.nodes(job)[-1]
    cluster.kill(victim, f"-m ftkit.train [^ ]*{run}")
    status = cluster.wait(run, lambda status: bool(status["restarts"]) and status["start"]["resumed_from"] >= 20)
    assert (status["state"], status["job_id"], len(status["restarts"])) == ("running", job, 1)
    assert "restart 1 of at most 3" in cluster.execute("ftkit", "logs", run).stdout
    cluster.switch("kill-node", victim)
    cluster.wait(run, lambda status: status["state"] in {"pending", "node-failure"})
    start_now(cluster, run)
    try:
        status = cluster.wait_for_completion(run)
    finally:
        cluster.switch("revive-node", victim)
    assert status["last_step"]["step"] == 150
    assert status["start"]["resumed_from"] >= 20


def test_with_slurm_s_own_time_outs_a_run_that_lost_a_node_waits_and_is_requeued(cluster: Cluster) -> None:
    with cluster.default_timeouts():
        run = cluster.submit("unnoticed", *LONG, "training.max_steps=150")
        job = cluster.wait(run, is_training)["job_id"]
        victim = cluster.nodes(job)[-1]
        cluster.switch("kill-node", victim)
        cluster.wait_for_log(run, "waiting for Slurm to notice (SlurmdTimeout is 300 s)")
        assert cluster.status(run)["state"] == "running"
        cluster.declare_dead(victim)
        cluster.wait(run, lambda status: status["state"] == "pending")
        start_now(cluster, run)
        try:
            status = cluster.wait_for_completion(run)
        finally:
            cluster.switch("revive-node", victim)
    assert status["last_step"]["step"] == 150
    assert status["start"]["resumed_from"] >= 20


# What Slurm does when the time limit is near; and what people type.
@pytest.mark.parametrize("signal", [("USR1", "--batch"), ("USR1",), ("TERM",)], ids=" ".join)
def test_a_run_asked_to_stop_writes_a_checkpoint_and_continues_later(cluster: Cluster, signal: tuple[str, ...]) -> None:
    name = f"interrupted-{len(signal)}-{signal[0].lower()}"
    run = cluster.submit(name, *LONG, "training.max_steps=150", "training.checkpoint_every_steps=1000")
    job = cluster.wait(run, is_training)["job_id"]
    assert cluster.execute("scancel", f"--signal={signal[0]}", *signal[1:], job).returncode == 0
    cluster.wait(run, lambda status: status["state"] in {"pending", "stopped"})
    start_now(cluster, run)
    status = cluster.wait_for_completion(run)
    assert status["last_step"]["step"] == 150
    assert status["start"]["resumed_from"] > 25


def test_a_second_job_in_a_run_s_folder_is_refused_and_the_first_continues(cluster: Cluster) -> None:
    run = cluster.submit("twice", *LONG, "training.max_steps=150")
    job = cluster.wait(run, is_training)["job_id"]
    cluster.ftkit("resume", run, "--no-follow", expect=6)
    folder = cluster.folder(run)
    second = cluster.execute("sbatch", "--wait", f"--chdir={folder}", f"{folder}/job.sbatch")
    assert second.returncode != 0
    log = cluster.ftkit("logs", run).stdout
    assert f"another process trains in this run's folder: job {job}, process" in log
    assert cluster.wait_for_completion(run)["last_step"]["step"] == 150


def test_a_refusal_of_slurm_is_explained(cluster: Cluster) -> None:
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
    mkdir -p "$FTKIT_WORKSPACE" && exec ftkit run tests/train/tiny.yaml --cluster dev training.max_steps=2
    """
    done = cluster.execute("bash", "-c", script, settings["workspace"]["value"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2/2" in done.stderr


def start_now(cluster: Cluster, run: str) -> None:
    """Spare the test the two minutes that Slurm lets a requeued job wait."""
    job = cluster.status(run)["job_id"]

    def has_started() -> bool:
        cluster.execute("scontrol", "update", f"jobid={job}", "StartTime=now")
        return bool(cluster.status(run)["state"] != "pending")

    wait_until(has_started)
