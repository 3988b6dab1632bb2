"""`scripts/setup`, with a fake pip."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("scripts/setup", "pyproject.toml", "constraints-cpu.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(CHECKOUT / name, tmp_path / name)
    return tmp_path


def set_up(copy: Path, pip: str) -> subprocess.CompletedProcess[str]:
    python = copy / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f"#!/bin/sh\n{pip}\n")
    python.chmod(0o755)
    return subprocess.run([copy / "scripts" / "setup", "train"], capture_output=True, text=True, check=False)


def test_an_installation_without_a_terminal_prints_only_its_downloads(copy: Path) -> None:
    done = set_up(
        copy, 'echo "Collecting torch"; echo "  Downloading torch.whl (800 MB)"; echo "Successfully installed"'
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines()[1:] == ["  Downloading torch.whl (800 MB)", "Successfully installed"]
    again = set_up(copy, "exit 1")
    assert (again.returncode, again.stderr) == (0, "")  # nothing changed, so nothing is installed


def test_a_failed_installation_reports_the_reason_and_is_retried_next_time(copy: Path) -> None:
    for _ in range(2):
        done = set_up(copy, 'echo "ERROR: no space" >&2; exit 3')
        assert done.returncode == 3
        assert "ERROR: no space" in done.stderr
