"""A bound on the whole time of a request. HTTP libraries bound only each read, so a trickle of bytes never ends."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

ResultT = TypeVar("ResultT")


class DeadlineError(Exception):
    """The work was not done in time."""


def within(seconds: float, work: Callable[[], ResultT]) -> ResultT:
    """Return what `work` returns, or raise what it raises.

    It runs in a thread that is left behind when the time is over: a blocked read can't be interrupted, whether it
    waits for a header, a body or TLS. The thread does not keep the process from ending.

    Raises:
        DeadlineError: the time is over.
    """
    result: Future[ResultT] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again below
            result.set_exception(error)

    threading.Thread(target=run, name="request", daemon=True).start()
    try:
        return result.result(seconds)
    except TimeoutError as error:
        if result.done():
            raise
        raise DeadlineError from error
