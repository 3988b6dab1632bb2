"""Makes steps as slow as those of a usual model: a run of a million tiny ones would take the CPUs from other tests."""

from __future__ import annotations

import sys
import time
from importlib.abc import MetaPathFinder


class _WithTheLoop(MetaPathFinder):
    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "ftkit.train.loop":
            from torch.optim.optimizer import register_optimizer_step_post_hook

            register_optimizer_step_post_hook(lambda *_: time.sleep(0.2))


sys.meta_path.insert(0, _WithTheLoop())
