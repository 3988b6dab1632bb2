"""Nodes with faults: `ftkit doctor` reports each, and runs exclude them."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Cluster

CHECKOUT = Path(__file__).parents[2]
DEV_CLUSTER = CHECKOUT / "scripts" / "dev-cluster"
STATE = Path(os.environ.get("FTKIT_DEV_CLUSTER_DIR", "/var/lib/ftkit-dev-cluster"))
TINY = "tests/train/tiny.yaml"
STAND_INS = CHECKOUT / "tests" / "slurm" / "stand_ins"
PROFILE = """
name: boxes
extends: dev
description: the dev cluster, in containers by a stand-in for Apptainer
runtime: apptainer
node_local_dir: /mnt/localssd/scratch
"""


def on_node(node: str, script: str) -> None:
    subprocess.run([str(DEV_CLUSTER), "node", node, "--", "sh", "-c", script], check=True, capture_output=True)


@contextmanager
def faults(**nodes: dict[str, Any]) -> Iterator[None]:
    """Set faults of nodes, which the stand-ins read."""
    paths = {node: STATE / "machines" / node / "localssd" / "faults.json" for node in nodes}
    for node, path in paths.items():
        path.write_text(json.dumps(nodes[node]))
    try:
        yield
    finally:
        for path in paths.values():
            path.unlink()


@pytest.fixture
def image(cluster: Cluster, shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    cluster.execute("sh", "-c", f"printf '%s' '{PROFILE}' >~/.config/ftkit/clusters/boxes.yaml")
    (shared_folder / "image.sif").write_text("stands for an image")
    monkeypatch.setenv("FTKIT_TEST_PATH", str(STAND_INS))  # dev-cluster passes variables that start with FTKIT_
    assert os.environ["FTKIT_TEST_PATH"]
    return str(shared_folder / "image.sif")


def ftkit(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ftkit with the stand-ins first on PATH."""
    script = 'export PATH="$FTKIT_TEST_PATH:$PATH"; exec ftkit "$@"'
    return cluster.execute("bash", "-c", script, "ftkit", *words)


@contextmanager
def full_disk(node: str) -> Iterator[None]:
    """Fill a node's local disk."""
    scratch = "/mnt/localssd/scratch"
    on_node(node, f"mkdir -p {scratch} && mount -t tmpfs -o size=1m,mode=1777 full {scratch}")
    try:
        on_node(node, f"head -c 1m /dev/zero >{scratch}/fill")
        yield
    finally:
        on_node(node, f"umount {scratch} && rm -r {scratch}")


@contextmanager
def no_shared_files(node: str) -> Iterator[None]:
    """Hide the shared file system from a node."""
    on_node(node, f"mount -t tmpfs -o mode=755 none {STATE}/shared")
    try:
        yield
    finally:
        on_node(node, f"umount {STATE}/shared")


def test_doctor_reports_the_fault_of_each_node(cluster: Cluster, image: str) -> None:
    with full_disk("n2"), faults(n1={"slow": True}, n3={"driver": True}, n4={"no_containers": True}):
        done = ftkit(cluster, "doctor", "--cluster", "boxes", "--nodes", "all", "--image", image, "--json")
    assert done.returncode == 12, done.stderr
    found = json.loads(done.stdout)
    assert found["exclude"] == ["n1", "n2", "n3", "n4"]
    problems = {each["host"]: each["problem"] for each in found["nodes"]}
    assert "hardware slowdown" in problems["n1"]
    assert "matrix products" in problems["n1"]
    assert "No space left on device" in problems["n2"]
    assert "CUDA 11.4; the image has CUDA 12.8" in problems["n3"]
    assert "no loop device available" in problems["n4"]


def test_a_run_excludes_nodes_with_faults_and_trains_on_the_others(cluster: Cluster, image: str) -> None:
    short = ("--processes-per-node", "1", "training.max_steps=2", "evaluation.generation=null")
    with (
        no_shared_files("n1"),  # the node on which the job script starts
        full_disk("n3"),  # its replacement
        faults(n3={"driver": True}, n4={"no_containers": True}),
    ):
        done = ftkit(
            cluster, "run", TINY, "--cluster", "boxes", "--nodes", "2", "--image", image, "--name", "picky",
            "--prepare", "here", "resources.preflight=true", *short,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = cluster.folder(cluster.status("picky")["id"])
    excluded = json.loads((run / "manifest.json").read_text())["starts"][-1]["excluded_nodes"]
    assert set(excluded) == {"n1", "n3", "n4"}
    for host, reason in excluded.items():
        assert f"excluded {host}: {reason}" in done.stderr
    assert excluded["n1"].startswith("can't access ")
    assert "No space left on device" in excluded["n3"]
    assert "CUDA 11.4; the image has CUDA 12.8" in excluded["n3"]
    assert "no loop device available" in excluded["n4"]
    newest = max((run / "preflight").iterdir(), key=lambda path: path.stat().st_mtime)
    assert {path.stem for path in newest.glob("*.out")} == {"n2", "n5"}
