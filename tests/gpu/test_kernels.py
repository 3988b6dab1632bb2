"""Attention kernels, packed, compiled and sharded on one and two GPUs, match transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import PATIENCE_SECONDS

PROGRAM = Path(__file__).with_name("kernel_matrix.py")
pytestmark = pytest.mark.gpu


@cache
def results(kernel: str, gpus: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Run all models with a kernel, once per pytest process."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs, {torch.cuda.device_count()} are here")
    output = folder / f"{kernel}-{gpus}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    done = subprocess.run(
        [*command, str(PROGRAM), kernel, str(output)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    loaded: dict[str, dict[str, Any]] = json.loads(output.read_text())
    return loaded


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("kernel", ["flash4", "cudnn", "flex", "sdpa"])
def test_training_with_each_kernel_matches_transformers(
    kernel: str, gpus: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if kernel == "flash4":
        pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    if kernel == "cudnn":
        pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    for name, found in results(kernel, gpus, tmp_path_factory.getbasetemp()).items():
        assert found["differing_weights"] == 0, name
        assert found["before"] == pytest.approx(found["reference"], rel=2e-3), name
        assert found["losses"][0] == pytest.approx(found["reference"], rel=2e-3), name
        assert found["losses"][2] < found["losses"][0], name


@pytest.mark.parametrize("kernel", ["flex", "sdpa"])
def test_two_gpus_compute_the_same_as_one(kernel: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    one, two = (results(kernel, gpus, tmp_path_factory.getbasetemp()) for gpus in (1, 2))
    for name, found in one.items():
        assert two[name]["before"] == pytest.approx(found["before"], rel=2e-4), name
        assert two[name]["norms"][0] == pytest.approx(found["norms"][0], rel=2e-2), name
