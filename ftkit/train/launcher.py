"""`python -m ftkit.train.launcher ...`: torchrun, as jobs on Slurm start it; and how a rank follows its torchrun.

Slurm may send a signal that asks to stop (before it pre-empts a job, or `scancel --signal`) to every process of a
job. The task's shell turns it into the stop file, which leads to a checkpoint; torchrun would end all ranks, so it
must not hear of it. A rank, in turn, tells by the sender whether SIGTERM comes from its torchrun.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
TERMINATED = 128 + signal.SIGTERM
"""Exit code of a rank that its torchrun ended, as a shell would report it."""


def main(arguments: list[str]) -> None:
    """Run torchrun, deaf to requests to stop. What it starts inherits both."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # torchrun installs a handler, which never runs
    from torch.distributed.run import main as torchrun  # noqa: PLC0415 - after the mask: its threads inherit it

    torchrun(arguments)


def follow_launcher(on_end: Callable[[], None]) -> None:
    """Let this process end with the one that started it, and at that one's SIGTERM. Call it before threads are started.

    torchrun starts its ranks in sessions of their own: killed itself, it would leave them training.

    Args:
        on_end: called, in another thread, before SIGTERM ends this process.
    """
    launcher = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died just before
        os._exit(TERMINATED)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_wait_for_sigterm, args=(launcher, on_end), name="sigterm", daemon=True).start()


def _wait_for_sigterm(launcher: int, on_end: Callable[[], None]) -> None:
    while (received := signal.sigwaitinfo({signal.SIGTERM})).si_pid != launcher:
        log.warning("SIGTERM of process %d: a rank stops when the stop file is there, or its torchrun ends it",
                    received.si_pid)  # fmt: skip
    on_end()
    os._exit(TERMINATED)


if __name__ == "__main__":
    main(sys.argv[1:])
