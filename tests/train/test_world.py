from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch
from ftkit.planning.plan import PlacementPlan
from ftkit.train.world import init_world

print(torch.get_float32_matmul_precision())
with init_world(PlacementPlan(1, 1, "cpu", 1)):
    print(torch.get_float32_matmul_precision())
"""


def test_fp32_matmuls_stay_fp32_in_images_that_enable_tf32() -> None:
    environment = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["high", "highest"]
