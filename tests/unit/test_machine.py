"""What unit tests see of the machine: `machine.PROGRAMS`, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from machine import FIXED, KEPT, PROGRAMS, Machine

from ftkit.config.context import Context
from ftkit.health.site import detect_site

HOSTILE = ("sbatch", "sinfo", "srun", "enroot", "apptainer", "docker", "nvidia-smi", "dcgmi", "gcloud", "ssh", "uv")


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with stand-ins of all programs, variables and settings that lead elsewhere, and a file of calls."""
    (tmp_path / "bin").mkdir()
    for name in (*HOSTILE, "git", "bash"):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\necho {name} >>{tmp_path}/calls\nexit 99\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    monkeypatch.setattr(os, "defpath", f"{tmp_path}/bin")
    for name in ("FTKIT_CLUSTER", "SLURM_JOB_ID", "MASTER_ADDR", "HF_HOME", "HTTPS_PROXY", "GIT_DIR", "COLUMNS"):
        monkeypatch.setenv(name, "/hostile")
    return tmp_path / "calls"


def test_a_sealed_process_sees_only_the_programs_and_variables_of_its_machine(hostile: Path) -> None:
    machine = Machine()
    before = dict(os.environ)
    try:
        with machine.entered():
            assert [name for name in HOSTILE if shutil.which(name) or shutil.which(name, path=os.defpath)] == []
            extra = os.environ.keys() - FIXED.keys() - {"PATH", "HOME"}
            assert [name for name in extra if not name.startswith(KEPT)] == []
            assert list(Path.home().iterdir()) == []
            subprocess.run(["git", "--version"], check=True, capture_output=True)
        assert dict(os.environ) == before
    finally:
        machine.remove()
    assert not hostile.exists()


def test_this_test_is_sealed() -> None:
    programs = Path(os.environ["PATH"])
    assert {path.name for path in programs.iterdir()} <= set(PROGRAMS.split())
    assert Path.home().parent == programs.parent


def test_neither_an_empty_environment_nor_that_of_the_test_leads_to_the_machine() -> None:
    ctx = Context.here()
    for environment in ({}, ctx.environment):
        site = detect_site(environment, ctx.root)
        assert not site.is_slurm_silent
        assert (site.slurm_version, site.enroot, site.apptainer, site.docker) == ("", "", "", "")
        assert (site.num_gpus, site.shared_folders) == (0, ())
