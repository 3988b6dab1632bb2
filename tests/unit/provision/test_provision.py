"""Cluster descriptions: golden dry runs, modified blueprints, and rejected settings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from ftkit.cli.cluster import create_command
from ftkit.errors import ConfigError
from ftkit.provision.gcp_programs import change_blueprint
from ftkit.provision.providers import plan_provision, quota_problem
from ftkit.provision.settings import Kind, read_spec

GOLDEN = Path(__file__).parents[2] / "golden"
GCP = (
    "project=my-project", "zone=us-central1-a", "bucket=my-state",
    "service_account=1-compute@developer.gserviceaccount.com",
)  # fmt: skip
WORKERS = "workers=[{num_nodes: 6, gpu: h200, gpus_per_node: 8, fabric: fabric-5}]"
NEBIUS = (
    "tenant_id=tenant-e00a",
    "project_id=project-e00b",
    "region=eu-north1",
    "ssh_public_keys=[ssh-ed25519 AAAA me]",
)
CASES: dict[Kind, tuple[str, ...]] = {
    "a3-megagpu-8g": (*GCP, "flex_start=true", "filestore_tier=BASIC_SSD", "filestore_gib=2560"),
    "a4-highgpu-8g": (*GCP, "reservation=mine", "num_nodes=4", "filestore_tier=HIGH_SCALE_SSD"),
    "soperator": (*NEBIUS, WORKERS, "submounts=[{name: checkpoints, mount_path: /mnt/checkpoints, size_gib: 4096}]"),
    "gcp-vm-l4": ("project=my-project", "zone=us-central1-a"),
}
BLUEPRINT = """\
blueprint_name: some
vars:
  size: 3 # of the cluster
deployment_groups:
- group: cluster
  modules:
  - id: homefs
    source: modules/file-system/managed-lustre
    use: [net]
    settings:
      size_gib: $(vars.size)
  - id: nodes
    source: modules/nodes
    settings:
      machine_type: a3 # the GPUs
"""


@pytest.mark.parametrize("kind", CASES)
def test_a_dry_run_prints_every_file_and_command_and_runs_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.executable", "python3")
    done = CliRunner().invoke(create_command, ["train1", "--kind", kind, *CASES[kind], "--dry-run"])
    assert done.exit_code == 0, done.output
    printed = done.stdout.replace(str(tmp_path), "STATE")
    golden = GOLDEN / f"cluster-{kind}.sh"
    if os.environ.get("FTKIT_UPDATE_GOLDEN"):
        golden.write_text(printed, encoding="utf-8")
    assert printed == golden.read_text(encoding="utf-8")
    assert not list(tmp_path.iterdir())


def test_only_modules_of_a_blueprint_are_changed() -> None:
    changes = {
        "homefs": {"source": "modules/file-system/filestore", "settings": {"size_gb": 2560}},
        "nodes": {"settings": {"enable_placement": False}},
    }
    changed = change_blueprint(BLUEPRINT, changes)
    assert "size: 3 # of the cluster" in changed
    assert "machine_type: a3 # the GPUs" in changed
    blueprint = YAML(typ="safe").load(changed)
    home, nodes = blueprint["deployment_groups"][0]["modules"]
    assert home["settings"] == {"size_gb": 2560}
    assert home["use"] == ["net"]
    assert nodes["settings"] == {"machine_type": "a3", "enable_placement": False}
    # The variable 'size' is now unused, which the toolkit would reject.
    assert blueprint["validators"][0]["skip"] is True
    with pytest.raises(ValueError, match="no module 'absent'"):
        change_blueprint(BLUEPRINT, {"absent": {}})


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("a4-highgpu-8g", GCP, "exactly one of reservation, flex_start and spot"),
        ("a4-highgpu-8g", (*GCP[1:], "spot=true"), "project"),
        ("gcp-vm-l4", ("project=my-project", "zone=nowhere"), "zone"),
        ("gcp-vm-l4", ("project=my-project", "zone=us-central1-a", "machine_type=--evil"), "machine_type"),
        ("soperator", (*NEBIUS, "workers=[{num_nodes: 2}]"), "need the InfiniBand fabric's name"),
        ("soperator", (*NEBIUS, WORKERS[:-1] + ", {num_nodes: 1, gpus_per_node: 1}]"), "one set of workers"),
    ],
)
def test_settings_that_no_provider_accepts_are_rejected(kind: Kind, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_spec(kind, None, words)
    assert message in "\n".join(str(problem) for problem in caught.value.problems)


def test_a_name_that_the_toolkit_rejects_is_rejected_early() -> None:
    spec = read_spec("gcp-vm-l4", None, CASES["gcp-vm-l4"])
    with pytest.raises(ConfigError):
        plan_provision("train-1", "gcp-vm-l4", spec)


def test_the_quota_of_the_region_is_used() -> None:
    def info(value: str, *regions: str) -> str:
        return json.dumps({"dimensionsInfos": [{"details": {"value": value}, "applicableLocations": regions}]})

    assert quota_problem(info("10240", "us-east1"), "us-east1", 10240) is None
    assert quota_problem(info("-1", "us-east1"), "us-east1", 10240) is None
    assert quota_problem(info("5120", "us-east1"), "us-east1", 10240) == "5120 GiB of the required 10240 GiB"
    assert quota_problem(info("10240", "us-west1"), "us-east1", 10240) == "0 GiB of the required 10240 GiB"
    assert quota_problem("no JSON", "us-east1", 10240) is not None
