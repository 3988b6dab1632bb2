"""The rhythm of watching a run: look at its files often, ask its scheduler as often as that bears."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ftkit.errors import RunFailedError
from ftkit.launch.observe import observe_all
from ftkit.launch.scheduler import scheduler_for
from ftkit.runs.states import Observation, RunState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.runs.submission import SubmittedRun

_LOOK_SECONDS = 0.3
_LOST_SECONDS = 60


def looks(run: SubmittedRun) -> Iterator[Observation | None]:
    """Yield at each look: the state when the scheduler was asked, else None. Ends after a final state.

    Raises:
        RunFailedError: the scheduler has answered for a minute that it knows no such job.
    """
    pause = scheduler_for(run.submission.scheduler).poll_seconds
    last_known = time.monotonic()
    while True:
        overview = observe_all([run])
        seen = overview.states[run.id]
        yield seen
        if seen.is_final:
            return
        asked = time.monotonic()
        if seen.state is not RunState.UNKNOWN or overview.warnings:
            last_known = asked
        elif asked - last_known > _LOST_SECONDS:
            raise RunFailedError(f"lost sight of {run.id}: {seen.reason}", fix=f"look at its log: ftkit logs {run.id}")
        while time.monotonic() < asked + pause:
            time.sleep(_LOOK_SECONDS)
            yield None
