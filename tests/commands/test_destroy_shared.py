"""Two clusters that share all they can are destroyed one by one, with stand-ins that keep what they made."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ftkit.cli.groups import cluster_command as cluster
from ftkit.errors import ProvisionError

PROGRAMS = ("gcloud", "git", "go", "jq", "make", "nebius", "packer", "terraform")
GCP = (
    "--kind", "a4-highgpu-8g", "project=my-project", "zone=us-central1-a", "bucket=my-state", "spot=true",
    "service_account=1-compute@developer.gserviceaccount.com",
)  # fmt: skip
NEBIUS = (
    "--kind", "soperator", "tenant_id=tenant-e00a", "project_id=project-e00b", "region=eu-north1",
    "ssh_public_keys=[ssh-ed25519 AAAA me]", "workers=[{num_nodes: 1, gpu: h200, gpus_per_node: 1}]",
)  # fmt: skip
STATE = "gs/my-state/a4high-slurm"
OTHER_HOME = "of a colleague"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    programs, made = tmp_path / "bin", tmp_path / "made"
    programs.mkdir()
    made.mkdir()
    # A module, as Python keeps the bytecode of modules only: hundreds of these programs start.
    source = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import cloud_provider"
    for name in PROGRAMS:
        (programs / name).write_text(f"#!{sys.executable} -SI\n{source}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("MADE", str(made))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return made


def run(*words: str) -> Result:
    return CliRunner().invoke(cluster, [*words])


def create(*words: str) -> None:
    done = run("create", *words, "--yes")
    assert done.exit_code == 0, (done.output, done.exception)


def destroy(*words: str) -> str:
    done = run("destroy", *words, "--yes")
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def fail(made: Path, words: str | None) -> None:
    (made / "fail").unlink(missing_ok=True)
    if words is not None:
        (made / "fail").write_text(words, encoding="utf-8")


def nodes(made: Path) -> set[str]:
    return set(json.loads((made / "instances.json").read_text(encoding="utf-8")))


def granted(made: Path) -> int:
    return sum(len(members) for members in json.loads((made / "roles.json").read_text(encoding="utf-8")).values())


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_bucket_and_roles_of_two_clusters_stay_until_both_are_destroyed(made: Path) -> None:
    create("one", *GCP)
    create("two", *GCP)
    output = destroy("one")
    assert "cluster two" in output
    assert "repeat" in output
    assert nodes(made) == {"two-cluster"}
    assert granted(made) == 9
    assert files(made / STATE) == {"two/image-env/default.tfstate", "two/cluster/default.tfstate"}
    destroy("two")
    assert nodes(made) == set()
    assert granted(made) == 9  # "two" did not grant them
    destroy("one")
    assert granted(made) == 0
    assert not (made / "gs/my-state").exists()
    assert run("status", "one").exit_code != 0


def test_the_first_cluster_may_be_destroyed_last_or_created_again(made: Path) -> None:
    create("one", *GCP)
    create("two", *GCP)
    destroy("one")
    create("one", *GCP)
    destroy("two")
    assert nodes(made) == {"one-cluster"}
    destroy("one")
    assert (granted(made), nodes(made)) == (0, set())
    assert not (made / "gs/my-state").exists()


def test_a_cluster_of_another_account_counts_as_a_user(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create("one", *GCP)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / OTHER_HOME))
    create("two", *GCP)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    output = destroy("one")
    assert "gs://my-state/a4high-slurm/two/cluster/default.tfstate" in output
    assert nodes(made) == {"two-cluster"}
    assert granted(made) == 9
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / OTHER_HOME))
    destroy("two")
    assert nodes(made) == set()


def test_a_node_without_terraform_keeps_the_roles_and_a_file_keeps_the_bucket(made: Path) -> None:
    create("one", *GCP)
    (made / "gs/my-state/notes.txt").write_text("mine", encoding="utf-8")
    instances = json.loads((made / "instances.json").read_text(encoding="utf-8"))
    instances["workstation"] = ["1-compute@developer.gserviceaccount.com", ""]
    (made / "instances.json").write_text(json.dumps(instances), encoding="utf-8")
    output = destroy("one")
    assert "workstation" in output
    assert "gs://my-state/notes.txt" in output
    assert files(made / "gs/my-state") == {"notes.txt"}
    assert granted(made) == 9


def test_what_existed_before_stays(made: Path) -> None:
    (made / "gs/my-state/one/data").mkdir(parents=True)
    (made / "gs/my-state/one/data/default.tfstate").write_text("mine", encoding="utf-8")
    member = "serviceAccount:1-compute@developer.gserviceaccount.com"
    (made / "roles.json").write_text(json.dumps({"roles/file.editor": [member]}), encoding="utf-8")
    create("one", *GCP)
    destroy("one")
    assert files(made / "gs/my-state") == {"one/data/default.tfstate"}
    assert json.loads((made / "roles.json").read_text(encoding="utf-8"))["roles/file.editor"] == [member]


@pytest.mark.parametrize("step", ["gcluster destroy", "storage rm", "storage buckets delete"])
def test_an_interrupted_destruction_is_repeated_and_never_loses_the_state_of_remaining_nodes(
    made: Path, step: str
) -> None:
    create("one", *GCP)
    fail(made, step)
    assert isinstance(run("destroy", "one", "--yes").exception, ProvisionError)
    if nodes(made):
        assert "one/cluster/default.tfstate" in files(made / STATE)
    fail(made, None)
    destroy("one")
    assert (granted(made), nodes(made)) == (0, set())
    assert not (made / "gs/my-state").exists()


def test_a_dry_run_shows_what_goes_and_what_stays_and_removes_nothing(made: Path) -> None:
    create("one", *GCP)
    create("two", *GCP)
    before, things = files(made / "gs"), nodes(made)
    (made / "calls").unlink()
    shown = run("destroy", "one", "--dry-run").stdout
    assert [line for line in shown.splitlines() if "destroy" in line and line.endswith("--auto-approve")]
    assert "buckets delete" not in shown
    assert "cluster two" in shown
    assert (files(made / "gs"), nodes(made)) == (before, things)
    changing = (" destroy ", " rm ", " delete ", "remove-iam")
    assert not [
        call for call in (made / "calls").read_text(encoding="utf-8").splitlines() if any(map(call.count, changing))
    ]


@pytest.mark.parametrize("settings", [GCP, NEBIUS])
def test_the_name_of_another_accounts_cluster_is_refused_before_anything_of_it_changes(
    made: Path, settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create("one", *settings)
    states = {path: path.read_bytes() for path in made.rglob("*.tfstate")}
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / OTHER_HOME))
    failed = run("create", "one", *settings, "--yes")
    assert isinstance(failed.exception, ProvisionError)
    assert "use another name" in str(failed.exception)
    destroy("one")
    assert {path: path.read_bytes() for path in made.rglob("*.tfstate")} == states
    assert len(nodes(made)) == 1


def test_two_clusters_of_a_nebius_project_have_states_of_their_own(made: Path) -> None:
    create("one", *NEBIUS)
    create("two", *NEBIUS)
    assert nodes(made) == {"soperator-one", "soperator-two"}
    destroy("one")
    assert nodes(made) == {"soperator-two"}
    destroy("two")
    assert nodes(made) == set()
