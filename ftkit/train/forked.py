"""Fork a node's ranks from one process that has imported torch and transformers, instead of importing them in each."""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ftkit.train import quiet

if TYPE_CHECKING:
    from collections.abc import Sequence

TRAINER: Final = "ftkit.train"
_OPTIONS: Final = ("--start-method=fork", "--run-path")
"""torchrun's own options for ranks that are functions: each runs a file as `__main__`."""
_CUDA_ERROR_NOT_INITIALIZED: Final = 3
"""Of CUDA's driver API (cuda.h)."""
_PR_SET_NAME: Final = 15
"""Of prctl(2): the name in top and in `ps -o comm`, of up to 15 bytes."""
_NVML_CHECK: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it, torch.cuda.is_available(), which libraries call when they are imported, does not initialize CUDA."""


def fork_trainer(arguments: Sequence[str]) -> list[str]:
    """Import what the trainer imports, and return torchrun's arguments such that it forks the ranks.

    Args:
        arguments: torchrun's, with `-m MODULE` and what the module gets.

    Returns:
        The same arguments if the module isn't the trainer, or if ranks can't be forked: an import failed (the ranks
        report why), or initialized CUDA, which a forked process can't use.
    """
    at = arguments.index("-m")
    if arguments[at + 1] != TRAINER or not _import_trainer():
        return list(arguments)
    entry = Path(__file__).with_name("__main__.py")
    return [*arguments[:at], *_OPTIONS, str(entry), *arguments[at + 2 :]]


def _import_trainer() -> bool:
    quiet.silence_torchao()
    os.environ[_NVML_CHECK] = "1"
    try:
        importlib.import_module("ftkit.train.trainer")
    except Exception:  # noqa: BLE001 - the ranks will raise the same error and record it
        return False
    finally:
        del os.environ[_NVML_CHECK]
    return not _has_initialized_cuda()


def _has_initialized_cuda() -> bool:
    """Ask the driver itself: libraries can initialize it past torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return bool(driver.cuDeviceGetCount(ctypes.byref(count)) != _CUDA_ERROR_NOT_INITIALIZED)


def is_forked() -> bool:
    """Return whether torchrun forked this process, instead of starting a program."""
    return multiprocessing.parent_process() is not None


def begin_session(rank: int) -> None:
    """Undo what a forked rank inherits of torchrun: session, and hence terminal, signal handlers, and name."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"ftkit rank {rank}".encode())
