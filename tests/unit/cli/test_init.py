from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ftkit.health import site

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import FakePrograms, Result


@pytest.fixture
def login_node(programs: FakePrograms) -> FakePrograms:
    """A login node of a Slurm cluster with pyxis and two H200 nodes."""
    programs.add(
        "sinfo",
        '[ "$1" = --version ] && { echo "slurm 24.11.1"; exit; }; echo "gpu*|up|2|192|gpu:h200:8(S:0-1)|4:00:00|1"',
    )
    programs.answer("srun", "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]\n")
    programs.answer("scontrol", "ClusterName             = mine\nTmpFS                   = /tmp\n")
    programs.answer("sacctmgr", "mine|research\n")
    for name in ("sbatch", "squeue", "scancel", "sacct"):
        programs.answer(name)
    return programs


@pytest.mark.usefixtures("login_node")
def test_a_run_does_not_train_on_the_login_node_by_mistake(ftkit: Callable[..., Result]) -> None:
    refused = ftkit("run", "demo", "--dry-run")
    assert refused.code == 3
    assert "ftkit init" in refused.err
    assert ftkit("run", "demo", "--dry-run", "--cluster", "local").code == 0


@pytest.mark.parametrize(
    ("stderr", "code"),
    [
        ("slurm_load_partitions: Unable to contact slurm controller (connect failure)", 3),
        ("sinfo: fatal: Could not establish a configuration source", 0),  # a machine of no cluster
    ],
)
def test_a_run_does_not_train_on_the_login_node_while_slurm_does_not_respond(
    stderr: str, code: int, ftkit: Callable[..., Result], login_node: FakePrograms
) -> None:
    login_node.answer("sinfo", stderr=stderr, code=1)
    done = ftkit("run", "demo", "--dry-run")
    assert done.code == code
    assert ("does not respond" in done.err) == bool(code)
    assert ftkit("run", "demo", "--dry-run", "--cluster", "local").code == 0


def test_a_run_does_not_train_on_the_login_node_of_a_slow_slurm(
    ftkit: Callable[..., Result], login_node: FakePrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "_TIMEOUT_SECONDS", 0.1)
    login_node.add("sinfo", "sleep 600")
    done = ftkit("run", "demo", "--dry-run")
    assert done.code == 3
    assert "does not respond" in done.err


def test_what_init_did_not_detect_is_a_comment_in_the_profile(
    ftkit: Callable[..., Result], login_node: FakePrograms
) -> None:
    login_node.answer("sinfo", "gpu*|up|2|192|gpu:8(S:0-1)|4:00:00|1\n")
    assert ftkit("init", "--yes").code == 0
    comments = [line for line in Path("clusters/mine.yaml").read_text().splitlines() if line.startswith("#")]
    assert any("'gpu:', one of" in line and "h100-80gb" in line for line in comments)
    assert "to one of" in ftkit("plan", "--image", "olmo3:25.02", "--nodes", "2").out


@pytest.mark.usefixtures("login_node")
def test_the_commands_printed_by_init_work(ftkit: Callable[..., Result]) -> None:
    done = ftkit("init", "--yes")
    assert done.code == 0, done.err
    assert "extends slurm" in done.err
    script = ftkit("run", "--image", "olmo3:25.02", "--nodes", "2", "--dry-run")
    assert script.code == 0, script.err
    for line in ("--partition=gpu", "--gpus-per-node=8", "--time=04:00:00", "--nodes=2"):
        assert f"#SBATCH {line}\n" in script.out
    findings = {each["check"]: each for each in json.loads(ftkit("doctor", "--json").out)["login_node"]}
    assert findings["partition"]["status"] == findings["account"]["status"] == findings["workspace"]["status"] == "ok"
    assert findings["hub"]["status"] == "warning"


def test_nothing_is_set_up_while_slurm_does_not_respond(ftkit: Callable[..., Result], login_node: FakePrograms) -> None:
    what = "slurm_load_partitions: Unable to contact slurm controller (connect failure)"
    login_node.answer("sinfo", "slurm 24.11.1", stderr=what, code=1)
    refused = ftkit("init", "--yes")
    assert (refused.code, "not respond" in refused.err) == (14, True)
    assert not Path("ftkit.yaml").exists()
    login_node.answer("sinfo", stderr="sinfo: fatal: Could not establish a configuration source", code=1)
    assert ftkit("init", "--yes").code == 0  # a machine of no cluster
    assert "cluster: local" in Path("ftkit.yaml").read_text()


def test_a_cluster_of_one_node_gets_a_command_for_one_node(
    ftkit: Callable[..., Result], login_node: FakePrograms
) -> None:
    login_node.answer("sinfo", "gpu*|up|1|192|gpu:h200:8(S:0-1)|4:00:00|1")
    done = ftkit("init", "--yes")
    assert done.err.endswith("Try: ftkit run --image olmo3:25.02 --nodes 1\n")
    assert ftkit("run", "--image", "olmo3:25.02", "--nodes", "1", "--dry-run").code == 0


@pytest.mark.usefixtures("login_node")
def test_existing_files_are_changed_only_on_request_and_keep_other_keys(
    ftkit: Callable[..., Result],
) -> None:
    settings = Path("ftkit.yaml")
    settings.write_text("# ours\nimage: olmo3:25.02\ncluster: local\n")
    refused = ftkit("init", "--yes")
    assert (refused.code, "--force" in refused.err) == (3, True)
    assert "cluster: local" in settings.read_text()
    assert not Path("clusters").exists()
    for _ in range(2):  # the second time on its own files
        assert ftkit("init", "--yes", "--force").code == 0
        assert settings.read_text() == "# ours\nimage: olmo3:25.02\ncluster: mine\n"
        assert "extends: slurm\n" in Path("clusters/mine.yaml").read_text()


def test_init_works_without_slurm(ftkit: Callable[..., Result], programs: FakePrograms) -> None:
    assert ftkit("init").code == 0
    assert "cluster: local" in Path("ftkit.yaml").read_text()
    assert programs.calls("s") == []


@pytest.mark.usefixtures("login_node")
def test_doctor_reports_differences_between_the_profile_and_slurm(ftkit: Callable[..., Result]) -> None:
    Path("clusters").mkdir()
    Path("clusters/odd.yaml").write_text(
        "name: odd\nextends: slurm\ndescription: x\npartition: nope\nruntime: apptainer\n"
    )
    done = ftkit("doctor", "--cluster", "odd", "--image", "olmo3:25.02")
    assert done.code == 12
    assert "one of gpu" in done.err
    assert "partition, containers, image" in done.err


def test_variables_of_dotenv_are_set_and_config_shows_only_their_names(
    ftkit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "")  # so that it is restored after the test
    monkeypatch.delenv("HF_TOKEN")
    Path(".env").write_text("HF_TOKEN=hf_abcdefghijk\n")
    shown = ftkit("config")
    assert "sets HF_TOKEN" in shown.out
    assert "hf_abc" not in shown.out + shown.err
    findings = json.loads(ftkit("doctor", "--cluster", "local", "--json").out)["login_node"]
    assert {each["check"]: each["value"] for each in findings}["hub token"] == "found"
    assert "hf_abc" not in ftkit("run", "demo", "--dry-run", "--cluster", "local").out
    Path(".env").write_text("HF_TOKEN\n")
    assert ftkit("config").code == 3


def test_init_asks_before_it_changes_existing_files(
    ftkit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("ftkit.yaml").write_text("# mine\n")
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("click.confirm", lambda text, **_: asked.append(text))
    assert ftkit("init").code == 0
    assert asked == ["Change existing ftkit.yaml?"]
