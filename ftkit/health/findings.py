"""Findings of checks, and a runner of concurrent checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Literal, TypeVar

from ftkit.process import in_thread

ResultT = TypeVar("ResultT")
REPORT_PREFIX = "ftkit-report "  # of the line with a node's report as JSON
Status = Literal["ok", "warning", "failed", "unknown"]
"""`failed`: a run would not work, or not at full speed. `unknown`: the check was not possible."""


@dataclass(frozen=True)
class Finding:
    """The result of one check: its subject, the observed value, the fix if one is needed, and the GPU's index."""

    check: str
    status: Status
    value: str
    fix: str = ""
    gpu: int | None = None

    def __str__(self) -> str:
        about = self.check if self.gpu is None else f"GPU {self.gpu} {self.check}"
        return f"{about}: {self.value}"


def failures(findings: Iterable[Finding]) -> list[Finding]:
    return [each for each in findings if each.status == "failed"]


def run_all(functions: Sequence[Callable[[], ResultT]], seconds: float) -> list[ResultT | None]:
    """Run functions concurrently; return None for one that does not end in time. Functions may hang."""
    futures = [in_thread(function) for function in functions]
    wait(futures, seconds)
    return [future.result() if future.done() else None for future in futures]
