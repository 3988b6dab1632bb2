"""A user's script on two nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Cluster

SCRIPTS = "tests/slurm/scripts"


def test_a_script_with_accelerate_and_peft_runs_unchanged_on_two_nodes_with_a_warning_about_fsdp(
    cluster: Cluster,
) -> None:
    about = ("--script", f"{SCRIPTS}/sft.py", "--accelerate-config", f"{SCRIPTS}/accelerate.yaml")
    place = ("--cluster", "dev", "--nodes", "2", "--processes-per-node", "1", "--no-follow")
    done = cluster.ftkit("run", *about, *place, "--name", "sft", "--", "--output_dir", "{run}/model")
    run = done.stdout.strip().splitlines()[-1]
    status = cluster.wait_for_completion(run)
    assert "each of the 2 processes holds all" in status["sharding"]["warning"]
    assert status["sharding"]["sharding"] == "ddp"  # one model, not two independent ones
    assert status["end"]["step"] == 3
    assert (cluster.folder(run) / "model" / "adapter_model.safetensors").is_file()
    assert "FSDP is not on" in cluster.ftkit("logs", run).stdout
    assert "rank 1 of 2 is done" in cluster.ftkit("logs", run, "--rank", "1").stdout
