"""States of runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ftkit.runs.records import Seconds


class RunState(StrEnum):
    """State of a run; the values are what users read and scripts compare."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    NODE_FAILURE = "node-failure"
    TIMED_OUT = "timed-out"
    OUT_OF_MEMORY = "out-of-memory"
    PREEMPTED = "preempted"
    DAMAGED = "damaged"
    UNKNOWN = "unknown"


FAILURES = frozenset(
    {
        RunState.FAILED,
        RunState.NODE_FAILURE,
        RunState.TIMED_OUT,
        RunState.OUT_OF_MEMORY,
        RunState.PREEMPTED,
    }
)
"""States of runs that failed; the user did not request their end."""


@dataclass(frozen=True)
class Observation:
    """An observed state. Times are seconds since the epoch.

    Args:
        state: the state.
        is_final: whether the job has ended and will not continue by itself.
        reason: why it waits or failed, according to the scheduler or ftkit.
        exit_code: of the job script, once it ended.
        nodes: names of the nodes, as the scheduler writes them.
        started: when the job started, or is expected to.
        ended: when it ended.
    """

    state: RunState
    is_final: bool
    reason: str = ""
    exit_code: int | None = None
    nodes: str = ""
    started: Seconds | None = None
    ended: Seconds | None = None

    def __str__(self) -> str:
        """Return the state and its reason."""
        return f"{self.state}: {self.reason}" if self.reason else str(self.state)
