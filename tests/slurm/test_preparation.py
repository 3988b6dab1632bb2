"""The CPU-only preparation job of a run, on a real Slurm cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Cluster

SHORT = ("training.max_steps=2", "evaluation.generation=null")


def test_data_is_prepared_without_gpus_before_the_training_job_starts(cluster: Cluster) -> None:
    run = cluster.submit("prepared", *SHORT, "data.source.seed=71")
    cluster.wait_for_completion(run)
    log = (cluster.folder(run) / "logs" / "job.log").read_text()
    assert (
        log.index("preparing data and weights")
        < log.index("the data is prepared already")
        < log.index("building the model")
    )
    accounts = cluster.execute("sacct", "-X", "-n", "-P", "--format=JobName,State,ReqTRES", "--name=prepared-prepare")
    name, state, resources = accounts.stdout.strip().splitlines()[-1].split("|")
    assert (name, state) == ("prepared-prepare", "COMPLETED")
    assert "gpu" not in resources


def test_a_run_with_invalid_data_fails_without_allocating_a_gpu(cluster: Cluster) -> None:
    run = cluster.submit("unprepared", *SHORT, "data.source.seed=72", "training.sequence_length=16")
    status = cluster.wait_for_end(run)
    assert (status["state"], status["exit_code"]) == ("failed", 8)
    assert "longer than a pack of 16 tokens" in cluster.execute("ftkit", "status", run).stdout
    started = cluster.execute("sacct", "-X", "-n", "-P", "--format=State,Elapsed", "--jobs", status["job_id"]).stdout
    assert started.startswith("CANCELLED")
    assert started.strip().endswith("00:00:00")


def test_canceling_a_run_cancels_its_preparation_job(cluster: Cluster) -> None:
    run = cluster.submit("unwanted", *SHORT, "data.source.seed=73", "data.source.num_train=200000")
    assert "waits for the job that prepares" in cluster.status(run)["reason"]
    cluster.ftkit("cancel", run)
    assert cluster.wait_for_end(run)["state"] == "canceled"
    queued = ("squeue", "--noheader", "--states=PENDING,RUNNING", "--name=unwanted,unwanted-prepare")
    assert cluster.execute(*queued).stdout == ""
