"""States of runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ftkit.runs.records import Seconds


class RunState(StrEnum):
    """State of a run; the values are what users read and scripts compare, in ftkit's spelling.

    Slurm's states are in capitals and in Slurm's spelling (CANCELLED), and only where Slurm itself is quoted.
    """

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    STOPPED = "stopped"
    NODE_FAILURE = "node-failure"
    TIMED_OUT = "timed-out"
    OUT_OF_MEMORY = "out-of-memory"
    PREEMPTED = "preempted"
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> RunState | None:
        """Read the spelling of earlier versions."""
        return cls.CANCELED if value == "cancelled" else None


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

END_REASONS = {
    RunState.CANCELED: "canceled",
    RunState.NODE_FAILURE: "a node of its job failed",
    RunState.TIMED_OUT: "its job reached its time limit",
    RunState.OUT_OF_MEMORY: "its job ran out of memory",
    RunState.PREEMPTED: "preempted",
}
"""Why a start of training ended, if its job ended in this state, which the ranks themselves can't know."""


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
