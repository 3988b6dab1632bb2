"""`python -m ftkit.runs.storage RUN_FOLDER DESTINATION`: copy a run until SIGTERM, or until its trainer ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from ftkit.planning.layout import RunLayout
from ftkit.runs.storage.sync import RunCopy

_LOWEST_PRIORITY = 19
_POLL_SECONDS = 1.0


def main(folder: str, destination: str, trainer: int) -> int:
    """Copy a run; return 1 if the copy is incomplete at the end."""
    os.nice(_LOWEST_PRIORITY)
    stop_requested = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop_requested.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # inherited from the rank, which blocks it

    def is_over() -> bool:
        return stop_requested.is_set() or os.getppid() != trainer

    def wait(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not is_over():
            stop_requested.wait(_POLL_SECONDS)

    copy = RunCopy(RunLayout(Path(folder)), destination, _say)
    status = copy.follow(is_over, wait)
    if status.error:
        _say(f"not copied: {status.error}")
    return int(status.error is not None)


def _say(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(os.environ.get("FTKIT_COPIED_PROCESS", os.getppid()))))
