"""The wheel, installed in a new environment and used from another folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_SECONDS

CHECKOUT = Path(__file__).parents[2]

pytestmark = pytest.mark.packaging


def run(*command: str | Path, cwd: Path = Path("/"), expect: int = 0) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FTKIT_")}
    environment |= {"XDG_CONFIG_HOME": "/nonexistent", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def ftkit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a wheel installed without extras."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, CHECKOUT)
    (wheel,) = folder.glob("ftkit-*.whl")
    run(sys.executable, "-m", "venv", folder / "venv")
    constraints = CHECKOUT / "constraints-cpu.txt"
    run(folder / "venv/bin/python", "-m", "pip", "install", "--quiet", "-c", constraints, wheel)
    return folder / "venv/bin/ftkit"


def test_the_installed_command_finds_all_shipped_files(ftkit: Path) -> None:
    for listing, name in [("config recipes", "demo"), ("cluster list", "a3-megagpu-8g"), ("images", "olmo3:25.02")]:
        assert name in run(ftkit, *listing.split(), "--json")


def test_a_job_for_a_cluster_is_rendered_without_torch_or_slurm(ftkit: Path, tmp_path: Path) -> None:
    with_torch = run(ftkit.with_name("python"), "-c", "import importlib.util as u; print(u.find_spec('torch'))")
    assert with_torch.strip() == "None"
    script = run(
        ftkit, "run", "--image", "olmo3:25.02", "--nodes", "2", "--cluster", "a3-megagpu-8g", "--dry-run", cwd=tmp_path
    )
    assert script.startswith("#!/usr/bin/env bash\n")
    assert "--container-image" in script
    assert list(tmp_path.iterdir()) == []


def test_training_without_the_extra_reports_what_to_install(ftkit: Path, tmp_path: Path) -> None:
    run(ftkit, "run", "demo", "--cluster", "local", "--no-follow", cwd=tmp_path, expect=5)


def test_a_build_context_can_be_made_without_a_checkout(ftkit: Path, tmp_path: Path) -> None:
    definition = run(ftkit, "images", "definition", "olmo3:25.02", "--files", tmp_path / "files")
    assert "From: nvcr.io/nvidia/pytorch:25.02-py3" in definition
    names = {path.name for path in (tmp_path / "files").iterdir()}
    assert {"requirements.lock", "image.json"} < names
    (wheel,) = (tmp_path / "files").glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    run(tmp_path / "venv/bin/python", "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    check = (
        "from ftkit import assets; print(assets.DOCKERFILE.is_file(), (assets.CONTAINERS / 'ngc-25.02.lock').is_file())"
    )
    assert run(tmp_path / "venv/bin/python", "-c", check).strip() == "True True"
