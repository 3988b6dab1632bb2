"""Findings of checks."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

ResultT = TypeVar("ResultT")

Status = Literal["ok", "warning", "failed", "unknown"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: subject of the check, in a word or two.
        status: `failed` keeps a run from working or from being as fast as it should; `unknown` could not be checked.
        value: observed value.
        fix: what to do next; empty if nothing is wrong.
        gpu: index of the GPU; None if it is about the whole machine.
    """

    check: str
    status: Status
    value: str
    fix: str = ""
    gpu: int | None = None

    def __str__(self) -> str:
        about = self.check if self.gpu is None else f"GPU {self.gpu} {self.check}"
        return f"{about}: {self.value}"


def failures(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that failed."""
    return [each for each in findings if each.status == "failed"]


def start_all(functions: Sequence[Callable[[], ResultT]]) -> list[Future[ResultT]]:
    """Start functions concurrently, and return their futures.

    They run in daemon threads, which don't keep the process alive: a name server or a file system that never responds
    can't be interrupted, but the caller can stop waiting for it.
    """

    def run(function: Callable[[], ResultT], result: Future[ResultT]) -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where the result is read
            result.set_exception(error)

    results = [Future[ResultT]() for _ in functions]
    for function, result in zip(functions, results, strict=True):
        threading.Thread(target=run, args=(function, result), name="check", daemon=True).start()
    return results
