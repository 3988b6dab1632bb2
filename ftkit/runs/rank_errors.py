"""Errors that end ranks: the rank, or its launcher, writes one next to its log."""

from __future__ import annotations

import os
import re
import socket
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ftkit.errors import EXIT_CODES, DiskFullError, FtkitError, redact
from ftkit.files import read_json_if_valid, write_json
from ftkit.runs.records import Count, Seconds

if TYPE_CHECKING:
    from pathlib import Path

_LOST_PEER = re.compile(
    r"(connection|socket) (was )?(closed|reset|refused)|broken pipe|remote process exited|communicator was aborted"
    r"|timed out (waiting|after)|socket timeout",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL and torch's store in the remaining ranks after one has ended."""


@dataclass(frozen=True)
class RankError:
    """The error that ended a rank.

    `exit_code` is that of the error's class if the user can act on it, else 1; `can_resume` tells whether the run can
    continue as planned.
    """

    time: Seconds
    rank: Count
    host: str
    type: str
    message: str
    traceback: str
    exit_code: Annotated[int, Field(ge=1, le=255)]
    can_resume: bool = True

    @property
    def is_actionable(self) -> bool:
        """Whether the message suffices, and the traceback does not help the user."""
        return self.exit_code != 1

    @property
    def was_killed(self) -> bool:
        """Whether a signal killed the rank: its launcher recorded the signal's name."""
        return self.type.startswith("SIG")

    @property
    def reports_lost_peer(self) -> bool:
        """Whether it only reports that this rank lost another one, whose error is the cause."""
        return self.exit_code == 1 and _LOST_PEER.search(self.message) is not None

    @classmethod
    def from_exception(cls, error: BaseException, *, rank: int) -> RankError:
        """Return the error of an exception that is being handled."""
        return cls(
            time=time.time(),
            rank=rank,
            host=socket.gethostname(),
            type=type(error).__name__,
            message=redact(str(error), os.environ),
            traceback=redact("".join(traceback.format_exception(error)), os.environ),
            exit_code=error.exit_code if isinstance(error, FtkitError) else 1,
            can_resume=not isinstance(error, FtkitError) or error.can_resume,
        )


def write_rank_error(path: Path, error: RankError) -> None:
    """Write a rank's error next to its log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, error)


def record_rank_error(error: Exception, path: Path, disk_full: Path, *, rank: int) -> int:
    """Record the error that ended a rank; return its exit code. If the disk is full, also create `disk_full`."""
    recorded = RankError.from_exception(error, rank=rank)
    with suppress(OSError):
        if isinstance(error, DiskFullError):
            disk_full.touch()
        write_rank_error(path, recorded)
    return recorded.exit_code


def read_rank_error(path: Path) -> RankError | None:
    """Read an error; None if the file is not one. An unknown exit code, of another version of ftkit, becomes 1."""
    error = read_json_if_valid(path, RankError)
    return error if error is None or error.exit_code in EXIT_CODES else replace(error, exit_code=1)
