"""A dozen faults of `scripts/chaos`: the run ends as one that nothing disturbed. Without arguments it injects 200."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_SECONDS

CHAOS = Path(__file__).parents[2] / "scripts" / "chaos"
FAULTS = (
    "kill -9 of a rank", "kill -9 of a launcher", "power cut of a node", "scontrol requeue", "time limit",
    "death in a save: marker", "checkpoint truncated", "bit of a checkpoint flipped", "disk full",
    "checkpoints read-only", "resumed at another size",
)  # fmt: skip


@pytest.mark.usefixtures("cluster")
def test_a_dozen_faults_are_survived_and_change_nothing() -> None:
    size = ("--faults", "12", "--steps", "120", "--nodes", "1", "--seed", "14", "--only", *FAULTS)
    command = [sys.executable, str(CHAOS), *size]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| all | 12 | 12 |" in done.stdout
