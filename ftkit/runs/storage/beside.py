"""Copy a run in a separate process while it trains."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ftkit.runs.metrics_file import read_last_record
from ftkit.runs.records import EndRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.planning.layout import RunLayout
    from ftkit.planning.plan import RunPlan

log = logging.getLogger(__name__)
_MAX_WAIT_SECONDS = 900.0
"""Maximum wait for the copy; GPUs are idle meanwhile."""


@contextmanager
def copied_beside(plan: RunPlan) -> Iterator[None]:
    """Copy a run to its recipe's `sync` address while the block trains it.

    If the run completes, wait for the rest of the copy. After a stop request, don't wait: the job's time is up, and the
    next job copies the rest. The copying process ends if this one is killed.
    """
    layout, destination = plan.layout, plan.recipe.sync
    if destination is None:
        yield
        return
    copying = _start(layout, destination)
    try:
        yield
    finally:
        copying.send_signal(signal.SIGTERM)
        if _is_completed(layout):
            log.info("waiting for the copy of the run in %s", destination)
            try:
                copying.wait(_MAX_WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                log.warning("the copy is not complete: continue it with 'ftkit runs sync %s'", plan.id)


def _start(layout: RunLayout, destination: str) -> subprocess.Popen[bytes]:
    layout.logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ftkit.runs.storage", str(layout.root), destination]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "FTKIT_COPIED_PROCESS": str(os.getpid())}
    with layout.sync_log.open("ab") as output:
        # In a new session: a signal to the trainer must not end it in the middle of a file.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )


def _is_completed(layout: RunLayout) -> bool:
    last = read_last_record(layout.metrics)
    return isinstance(last, EndRecord) and last.outcome == "completed"
