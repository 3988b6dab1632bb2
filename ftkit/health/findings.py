"""Findings of checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

Status = Literal["ok", "warning", "failed", "unknown"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: subject of the check, in a word or two.
        status: `failed` keeps a run from working or from being as fast as it should; `unknown` could not be checked.
        value: observed value.
        fix: what to do next; empty if nothing is wrong.
        gpu: index of the GPU; None: it is about the whole machine.
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
