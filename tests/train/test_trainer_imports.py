from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from ftkit.train.launcher import UNUSED, faster_imports

with faster_imports():
    import ftkit.train.trainer
    from ftkit.train.private_apis.libraries import import_peft
    import_peft()

from torch import nn
peft = import_peft()
peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["0"]), nn.Sequential(nn.Linear(2, 2)))
others = ("datasets", "deepspeed", "matplotlib", "pandas", "pyarrow", "tensorboard", "torch._inductor.lowering")
print(*(name for name in (*UNUSED, *others) if name in sys.modules))
"""


def test_ranks_import_no_packages_that_they_do_not_use() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
