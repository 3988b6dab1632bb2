"""A run through enroot and pyxis, on machines that have them."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Cluster

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def profile(cluster: Cluster, shared_folder: Path) -> str:
    """A profile whose containers use this machine's programs through mounts, with an empty image."""
    if not (cluster.profiles / "dev-pyxis.yaml").exists():
        pytest.skip("enroot and pyxis are not on this machine")
    mounts = ["/usr", str(CHECKOUT), sys.base_prefix, sysconfig.get_path("purelib")]
    (cluster.profiles / "mounts.yaml").write_text(
        f"extends: dev-pyxis\nname: mounts\ndescription: x\nmounts: {mounts}\nstage: local\n"
        "node_local_dir: /mnt/localssd\n"
    )
    root = shared_folder / "root"
    for name in ("etc", "usr", "tmp", "proc", "sys", "dev", "run", "mnt", "var"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / name).symlink_to(f"usr/{name}")
    # enroot keeps an image's environment there; the job script sees to it that no login shell replaces PATH.
    (root / "etc/environment").write_text(f"PATH={CHECKOUT}/.venv/bin:/usr/bin\n")
    image = shared_folder / "tiny.sqsh"
    subprocess.run(["mksquashfs", root, image, "-all-root", "-quiet", "-no-progress"], check=True)
    image.chmod(0o644)
    return "mounts"


def test_a_run_in_containers_of_pyxis_is_staged_trains_and_exports(
    cluster: Cluster, profile: str, shared_folder: Path
) -> None:
    place = ("--cluster", profile, "--image", f"{shared_folder}/tiny.sqsh", "--nodes", "2", "--processes-per-node", "1")
    done = cluster.ftkit(
        "run", "tests/train/tiny.yaml", *place, "--name", "contained", "--no-follow", "training.max_steps=2"
    )
    run = done.stdout.strip().splitlines()[-1]
    status = cluster.wait_for_completion(run)
    assert status["end"]["step"] == 2
    log = (cluster.folder(run) / "logs/job.log").read_text()
    assert "the image is on the disks of 2 nodes, verified" in log
    assert list((cluster.folder(run) / "export").glob("*.safetensors"))


def test_a_run_continues_on_a_node_that_lost_its_power(cluster: Cluster, profile: str, shared_folder: Path) -> None:
    place = ("--cluster", profile, "--image", f"{shared_folder}/tiny.sqsh", "--nodes", "1", "--processes-per-node", "1")
    steps = ("training.max_steps=1000000", "training.checkpoint_every_steps=5", "evaluation.generation=null")
    done = cluster.ftkit(
        "run", "tests/train/tiny.yaml", *place, "--name", "cut", "--no-follow", "training.log_every_steps=1", *steps
    )
    run = done.stdout.strip().splitlines()[-1]
    cluster.wait_for_step(run, 6)
    nodes = cluster.nodes(cluster.job(run))
    cluster.switch("kill-node", nodes[0])
    cluster.switch("revive-node", nodes[0])
    cluster.start_again(run, 1)
    assert cluster.nodes(cluster.job(run)) == nodes
    cluster.wait_for_step(run, 6, start=1)
    cluster.ftkit("cancel", run)
    log = (cluster.folder(run) / "logs/job.log").read_text()
    assert "resumed from the checkpoint" in log
    assert "File already exists" not in log, "pyxis could not create the container beside the one of the first start"
