"""Give up a call that makes no progress: drivers wait long, some forever, for a store that does not answer."""

from __future__ import annotations

import time
from concurrent.futures import Future
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

ResultT = TypeVar("ResultT")

_SECONDS = 60.0
_MIN_BYTES_PER_SECOND = 2**20
"""Minimum transfer rate of a store that works."""


class Progress:
    """Records when a call last made progress."""

    def __init__(self) -> None:
        """Begin now."""
        self.last = time.monotonic()

    def note(self, *_: object, **__: object) -> None:
        """Note that bytes were copied."""
        self.last = time.monotonic()

    def callback(self) -> Any:
        """Return the callback for fsspec's drivers."""
        from fsspec.callbacks import Callback  # noqa: PLC0415 - heavy, and 'ftkit status' does without

        return Callback(hooks={"progress": self.note})


def call_patiently(call: Callable[[Progress], ResultT], unseen_bytes: int = 0) -> ResultT:
    """Return what a call returns; it runs in a thread, which is left behind if it hangs.

    Args:
        call: receives the function to report progress to.
        unseen_bytes: maximum number of bytes that are copied between two reports.

    Raises:
        TimeoutError: the call made no progress.
    """
    progress, future = Progress(), Future[ResultT]()
    patience = _SECONDS + unseen_bytes / _MIN_BYTES_PER_SECOND

    def run() -> None:
        try:
            future.set_result(call(progress))
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    while (left := progress.last + patience - time.monotonic()) > 0:
        try:
            return future.result(left)
        except TimeoutError:
            if future.done():  # the call itself raised it
                raise
    raise TimeoutError(f"no answer for {patience:.0f} s")
