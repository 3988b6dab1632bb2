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


class Cause(StrEnum):
    """Why a start ended. The manifest, the job script's note and `--json` have these values."""

    CANCELED = "canceled"
    DISK_FULL = "disk-full"
    ERROR = "error"
    KILLED = "killed"
    LOST_PEERS = "lost-peers"
    MORE_STEPS = "more-steps"
    NODE_FAILURE = "node-failure"
    OUT_OF_MEMORY = "out-of-memory"
    PREEMPTED = "preempted"
    REBOOT = "reboot"
    REQUEUED = "requeued"
    STOP_REQUEST = "stop-request"
    TIME_LIMIT = "time-limit"
    UNKNOWN = "unknown"

    @property
    def words(self) -> str:
        """The cause in words, without details."""
        return self.value.replace("-", " ")


STATES = {
    Cause.CANCELED: RunState.CANCELED,
    Cause.NODE_FAILURE: RunState.NODE_FAILURE,
    Cause.OUT_OF_MEMORY: RunState.OUT_OF_MEMORY,
    Cause.PREEMPTED: RunState.PREEMPTED,
    Cause.TIME_LIMIT: RunState.TIMED_OUT,
}
"""States of a run whose last start ended so, and did not start again."""

CAUSES = {state: cause for cause, state in STATES.items()}
"""Why a run's last start ended, if only the scheduler knows."""


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
        cause: why it ended, if that is known and not in the state itself.
    """

    state: RunState
    is_final: bool
    reason: str = ""
    exit_code: int | None = None
    nodes: str = ""
    started: Seconds | None = None
    ended: Seconds | None = None
    cause: Cause | None = None

    def __str__(self) -> str:
        """Return the state and its reason."""
        return f"{self.state}: {self.reason}" if self.reason else str(self.state)
