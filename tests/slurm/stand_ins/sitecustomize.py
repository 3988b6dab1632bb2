"""Makes a node's matmuls as slow as on a power-limited GPU, if its faults file says so.

A CPU is an outlier below a tenth of the median. The measured products take 3 ms on an idle machine and 20 ms on a busy
one; a second keeps the node an outlier in both cases.
"""

import json
from pathlib import Path

try:
    IS_SLOW = json.loads(Path("/mnt/localssd/faults.json").read_text()).get("slow")
except (OSError, ValueError):
    IS_SLOW = False
if IS_SLOW:
    import time

    import torch

    multiply = torch.mm

    def multiply_slowly(*arguments: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        time.sleep(1)
        return multiply(*arguments, out=out)

    torch.mm = multiply_slowly
