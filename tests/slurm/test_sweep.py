"""A sweep as one job array on a real Slurm cluster."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from waiting import wait_until

if TYPE_CHECKING:
    from conftest import Cluster

STEPS, EVERY = 60, 10
SWEEP = (
    "run", "tests/train/tiny.yaml", "--cluster", "dev", "--processes-per-node", "1", "--name", "sweep",
    "--max-parallel", "2",
    "training.seed=1,2,3,4", f"training.max_steps={STEPS}", f"training.checkpoint_every_steps={EVERY}",
    "training.keep_checkpoints=20", "evaluation.generation=null", "data.source.seed=91",
)  # fmt: skip


def test_a_sweep_is_one_array_of_which_two_runs_train_at_a_time_and_each_can_be_canceled_and_requeued(
    cluster: Cluster,
) -> None:
    done = cluster.ftkit(*SWEEP, "--no-follow")
    runs = done.stdout.split()
    jobs = [cluster.job(run) for run in runs]
    array = jobs[0].partition("_")[0]
    assert jobs == [f"{array}_{number}" for number in (1, 2, 3, 4)]
    waits = ("waits for the job that prepares", "--max-parallel")  # the latter once the first two may train
    # Slurm has no reason before it first considers a job.
    wait_until(lambda: any(each in cluster.status(runs[3])["reason"] for each in waits))

    num_running = set()

    def states() -> dict[str, str]:
        """Return the states of all tasks from one call, and remember how many run; Slurm counts none that ends."""
        listed = cluster.execute("squeue", "--noheader", "--array", "--states=all", "--format=%i|%T", "--jobs", array)
        found = dict(line.strip().split("|") for line in listed.stdout.splitlines())
        num_running.add([*found.values()].count("RUNNING"))
        return found

    # The first is requeued while it trains; the third is canceled while it waits.
    cluster._wait(runs[0], lambda: states()[jobs[0]] == "RUNNING" and bool(cluster.records(runs[0], "checkpoint")))
    status = cluster.status(runs[3])
    assert (status["job_id"], status["state"]) == (jobs[3], "pending")
    assert "--max-parallel" in status["reason"]
    evaluation = cluster.ftkit("eval", runs[3], "--as-job", "--limit", "2", "--max-new-tokens", "4").stdout.strip()
    assert cluster.slurm_state(jobs[3]) == "PENDING"
    cluster.ftkit("cancel", runs[2])
    assert cluster.execute("scontrol", "requeue", jobs[0]).returncode == 0
    assert states()[jobs[1]] in {"RUNNING", "COMPLETING", "COMPLETED"}, "the requeue is that of one task"

    # The last one, whose own number is the array's, requeues itself.
    cluster._wait(runs[3], lambda: bool(states() and cluster.records(runs[3], "step")))
    assert cluster.execute("scancel", "--batch", "--signal=USR1", jobs[3]).returncode == 0
    cluster._wait(runs[0], lambda: not {"PENDING", "RUNNING", "COMPLETING"} & set(states().values()), ends=True)
    assert max(num_running) == 2

    found = {each["id"]: each for each in json.loads(cluster.ftkit("runs", "sweep", "--json").stdout)}
    assert [found[run]["state"] for run in runs] == ["completed", "completed", "canceled", "completed"]
    assert [found[run]["job_id"] for run in runs] == jobs
    assert [len(cluster.records(run, "start")) for run in runs] == [2, 1, 0, 2]
    for run, cause in ((runs[0], "requeued"), (runs[3], "time-limit")):
        assert cluster.records(run, "start")[0]["resumed_from"] == 0
        assert cluster.records(run, "start")[1]["resumed_from"] > 0
        assert cluster.records(run, "step")[-1]["step"] == STEPS
        assert [each["reason"]["cause"] for each in cluster.status(run)["restarts"]] == [cause]
    assert f"job {jobs[3]} on n" in (cluster.folder(runs[3]) / "logs" / "job.log").read_text(encoding="utf-8")

    # A job that evaluates the checkpoints of one run ends after that run.
    cluster._wait(runs[3], lambda: cluster.slurm_state(evaluation) == "COMPLETED", ends=True)
    log = (cluster.folder(runs[3]) / "logs" / "evaluation.log").read_text(encoding="utf-8")
    assert "the training job has ended" in log
    evaluations = (cluster.folder(runs[3]) / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    assert max(json.loads(line)["step"] for line in evaluations) == STEPS

    # A run of the array is resumed as a job of its own.
    cluster.ftkit("resume", runs[2], "--no-follow")
    assert cluster.job(runs[2]).isdigit()
    assert cluster.wait_for_completion(runs[2])["earlier_job_ids"] == [jobs[2]]
