"""A rank with a fault: as the trainer's, which then hangs in step 8, or as a light program, which fails.

Arguments: of the trainer, the fault and the plan; of the light one (`python -m faulty_rank`), the plan, with the fault
in FTKIT_TEST_FAULT.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

STEP = 8
RANK = 1
FOREVER = 3600


def dawdle() -> None:
    time.sleep(FOREVER)


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(FOREVER)


def compute_natively() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


HANGS = {each.__name__: each for each in (dawdle, wait_for_a_lock, hold_the_interpreter, compute_natively, stop)}


def hang(fault: str) -> None:  # noqa: C901 - a fault each
    """Have the trainer hang in step 8, on rank 1."""
    from torch import distributed

    from ftkit.train import trainer
    from ftkit.train.checkpoint.saving import Checkpointer
    from ftkit.train.components.batches import BatchSchedule
    from ftkit.train.loop import Observer, train

    is_here = int(os.environ["RANK"]) == RANK

    class Fault(Observer):
        def __init__(self, progress: Any) -> None:
            self._progress = progress

        def begin(self, phase: str) -> None:
            if not is_here or phase != "backward" or self._progress.step != STEP - 1:
                return
            if fault in HANGS:
                HANGS[fault]()
            elif fault == "extra_collective":
                distributed.barrier()

        def end_step(self) -> None:
            if is_here and fault == "slow_evaluation" and self._progress.step == STEP:
                dawdle()

    def with_fault(world: Any, engine: Any, progress: Any, observers: Any, num_sources: int) -> None:
        observers.all.append(Fault(progress))
        train(world, engine, progress, observers, num_sources)

    build = BatchSchedule.step

    def read_rows(self: Any, step: int) -> Any:
        if is_here and step == STEP + 1:
            dawdle()
        return build(self, step)

    def write_slowly(*_: Any) -> None:
        dawdle()

    trainer.train = with_fault
    if fault == "data_worker":
        BatchSchedule.step = read_rows
    elif fault == "checkpoint_write" and is_here:
        Checkpointer._write = write_slowly


def truncated_file() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        mapped[0]


def fail(fault: str) -> None:
    if fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))
    elif fault == "truncated_file":
        truncated_file()
    elif fault == "exit":
        os._exit(3)
    elif fault == "disk_full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/shared/checkpoint")
    raise RuntimeError(fault)


if __name__ == "__main__" and "FTKIT_TEST_FAULT" in os.environ:
    from ftkit.planning.layout import RunLayout
    from ftkit.process import die_with_parent
    from ftkit.train.launcher import RunRank

    die_with_parent(os.getppid())
    if int(os.environ["RANK"]) != RANK:
        dawdle()
    try:
        fail(os.environ["FTKIT_TEST_FAULT"])
    except Exception as error:  # noqa: BLE001 - as the trainer does
        os._exit(RunRank(RunLayout(Path(sys.argv[1]).parent), print, print).fail(error))
elif __name__ == "__main__":
    from ftkit.train.__main__ import main

    hang(sys.argv[1])
    os._exit(main(Path(sys.argv[-1])))
