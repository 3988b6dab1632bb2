"""Scripts watched in this process, as `ftkit run --script --prove` watches them in theirs."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.runs.script_facts import RankFacts


def observe(script: Callable[[], object], rank: int = 0, world_size: int = 1) -> RankFacts:
    """Run a script under the watch; return what it observed."""
    from ftkit.train.step_watch import StepWatch

    found: list[RankFacts] = []
    watch = StepWatch(rank, world_size, found.append)
    gc.freeze()  # the watch need not look for schedulers in what was imported
    watch.start()
    try:
        script()
    finally:
        watch.finish()
        gc.unfreeze()
    return found[0]
