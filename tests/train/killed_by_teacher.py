"""A rank that is killed before it completes a shard of its teacher's distributions; it is started as the trainer.

Shards are small. Arguments: how many shards this rank completes, -1 for all; the plan.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from ftkit.train.__main__ import main
from ftkit.train.components import teacher

LEFT = [int(sys.argv[1])]
publish = teacher.publish


def publish_or_die(*paths: Any) -> None:
    if LEFT[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    LEFT[0] -= 1
    publish(*paths)


teacher.publish = publish_or_die
teacher._TOKENS_PER_SHARD = 2**12
os._exit(main(Path(sys.argv[-1])))  # as the trainer does
