"""Retries and deadlines of transfers. HTTP libraries limit only each read: a trickle of bytes would never end."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from ftkit.errors import ImageError
from ftkit.images.progress import ProgressEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftkit.images.progress import Report

ResultT = TypeVar("ResultT")

RETRY_SECONDS = (1.0, 3.0, 9.0)


class TransientError(ImageError):
    """A failure that may be temporary, such as a lost connection or a restart of the registry."""


class StalledError(TransientError):
    """A server sends too slowly, or has stopped sending."""


def retry(attempt: Callable[[], ResultT], report: Report, stage: str, waits: Sequence[float] | None = None) -> ResultT:
    """Return what `attempt` returns; after each `TransientError`, wait for the next of `waits` seconds and retry."""
    for wait in RETRY_SECONDS if waits is None else waits:
        try:
            return attempt()
        except TransientError as error:
            report(ProgressEvent(stage, text=f"{error.what}; trying again in {wait:g} s"))
            time.sleep(wait)
    return attempt()


class DeadlineError(Exception):
    """The work was not done in time."""


def within(seconds: float, work: Callable[[], ResultT]) -> ResultT:
    """Return what `work` returns, or raise what it raises.

    It runs in a thread that is abandoned at the deadline: a blocked read can't be interrupted, whether it waits for a
    header, a body or TLS. The thread does not keep the process from ending.

    Raises:
        DeadlineError: the work takes longer than `seconds`.
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
