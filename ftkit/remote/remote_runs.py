"""This machine's records of runs on login nodes: where each run is, and which submissions are unanswered."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ftkit.config.context import state_folder
from ftkit.files import file_lock_if_supported, read_json_if_valid, write_file, write_json
from ftkit.remote.ssh import Login
from ftkit.runs.find import RUN_ID

_NUM_KEPT: Final = 1000
_SUBMISSION_ID: Final = re.compile("[0-9a-f]{16}")


def printed_ids(output: str) -> list[str]:
    """Return the ids of runs that a submission printed, one per line."""
    return [line.strip() for line in output.splitlines() if RUN_ID.fullmatch(line.strip())]


NO_MATCH: Final = (False, "")


def rank_match(reference: str, run_id: str) -> tuple[bool, str]:
    """Return a value that is larger for the better match of two runs, then for the newer; or `NO_MATCH`.

    The whole id, a name, or a suffix matches better than the beginning of an id. Times are by the login node's clock.
    """
    match = RUN_ID.fullmatch(run_id)
    is_exact = match is not None and reference in ("last", run_id, match["name"], match["suffix"])
    return (is_exact, match["created"]) if match and (is_exact or run_id.startswith(reference)) else NO_MATCH


@dataclass(frozen=True)
class RemoteRun:
    """A run that was submitted on a login node, and the project here that it belongs to."""

    id: str
    login: Login
    project: Path


@dataclass(frozen=True)
class Records:
    folder: Path

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Records:
        return cls(state_folder(environment) / "remote")

    def runs(self) -> tuple[RemoteRun, ...]:
        """Return all runs, the newest submission last."""
        return (read_json_if_valid(self.folder / "runs.json", dict[str, tuple[RemoteRun, ...]]) or {}).get("runs", ())

    def find(self, reference: str) -> RemoteRun | None:
        """Return the run that `reference` matches best, by `rank_match`."""
        best = max(self.runs(), key=lambda run: rank_match(reference, run.id), default=None)
        return best if best and rank_match(reference, best.id) != NO_MATCH else None

    def add(self, ids: Sequence[str], login: Login, project: Path) -> None:
        """Record submitted runs; an OSError if that fails."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with file_lock_if_supported(self.folder / ".runs.lock"):  # other submissions may end now
            kept = [run for run in self.runs() if run.id not in ids]
            runs = (*kept, *(RemoteRun(run_id, login, project) for run_id in ids))
            write_json(self.folder / "runs.json", {"runs": runs[-_NUM_KEPT:]})

    @contextmanager
    def submission(self, login: Login, project: Path, words: Sequence[str]) -> Iterator[str]:
        """Yield the id of an unanswered submission of this command, or a new one; forget it unless the block raises."""
        key = hashlib.sha256(repr((login.address, login.folder, str(project), tuple(words))).encode()).hexdigest()[:16]
        file = self.folder / "unanswered" / key
        file.parent.mkdir(parents=True, exist_ok=True)
        submission = file.read_text(encoding="ascii", errors="replace") if file.exists() else ""
        if not _SUBMISSION_ID.fullmatch(submission):
            submission = secrets.token_hex(8)
            write_file(file, submission.encode())
        yield submission
        file.unlink(missing_ok=True)
