"""Read metrics.jsonl, completely or from its end, and append to it.

Reading never raises and takes bounded memory, for any content of the files: run folders are shared, and a damaged one
must not hide the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ftkit.errors import one_line, plural
from ftkit.files import DamagedFileError, PrivateFileError, open_regular
from ftkit.runs.records import EvaluationRecord, Record, StartRecord, StepRecord, from_line, is_damaged, to_line

MAX_LINE_BYTES = 2**23
"""Longer lines are skipped: the longest records, evaluations with samples, take a few hundred KiB."""
_MAX_TAIL_BYTES = 2**26  # number of bytes at the end of a file in which its newest record is searched
_TAIL_BYTES = 2**14  # number of bytes that are read first in this search

_STEP_LINE, _START_LINE = b'{"event": "step"', b'{"event": "start"'
"""The first characters of the records of steps and starts, as `to_line` writes them."""


def read_records(path: Path) -> Iterator[Record]:
    """Read all records of a run, one at a time; none if there are none yet."""
    return (record for line in _lines(path) if (record := from_line(line)) is not None)


def read_outline(path: Path) -> Iterator[Record]:
    """Read a run's first step and the records that are not steps: hundreds of megabytes take a second or two."""
    has_step = False
    for line in _lines(path):
        if has_step and line.startswith(_STEP_LINE):
            continue
        record = from_line(line)
        has_step |= isinstance(record, StepRecord)
        if record is not None:
            yield record


def read_job_evaluations(metrics: Path, evaluations: Path) -> list[EvaluationRecord]:
    """Return evaluations by separate jobs that the trainer has not yet copied into metrics.jsonl."""
    records = [record for record in read_records(evaluations) if isinstance(record, EvaluationRecord)]
    if not records:
        return []
    known = {(each.step, each.time) for each in read_outline(metrics) if isinstance(each, EvaluationRecord)}
    return [record for record in records if (record.step, record.time) not in known]


def find_damage(
    path: Path, *, tail_bytes: int | None = None, records: list[Record] | None = None, skips_steps: bool = False
) -> str:
    """Return which records can't be read, and why; empty if all can, or if there is no file yet.

    Readers skip such records, so a run with an unreadable file would look like one that has not started. With
    `tail_bytes`, only the lines in so many bytes at the end of the file are checked. The readable ones are appended to
    `records`; with `skips_steps`, without the steps after the first one of each start.
    """
    num_damaged, where, has_step = 0, "", False
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - (tail_bytes or size)))
            if file.tell():
                file.readline()  # the rest of a line
                where = " near its end"
            for line in _short_lines(file):
                is_skipped = records is None or (skips_steps and has_step and line.startswith(_STEP_LINE))
                record = None if is_skipped else from_line(line)
                if records is not None and record is not None:
                    records.append(record)
                    has_step = isinstance(record, StepRecord) or (has_step and not isinstance(record, StartRecord))
                elif line.endswith(b"\n"):  # the last line may still be being written
                    num_damaged += is_damaged(line)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except PermissionError:
        return PrivateFileError(path).what
    except OSError as error:
        return DamagedFileError(path, one_line(error)).what
    return f"{path.name} has {plural(num_damaged, 'damaged line')}{where}" if num_damaged else ""


def read_last_step(path: Path) -> StepRecord | None:
    """Read the newest step's record from the end of the file, without steps that a later start repeats."""
    resumed_from: float = math.inf
    for line in _lines_backwards(path):
        record = from_line(line) if line.startswith((_STEP_LINE, _START_LINE)) else None
        if isinstance(record, StartRecord):
            resumed_from = min(resumed_from, record.resumed_from)
        elif isinstance(record, StepRecord) and record.step <= resumed_from:
            return record
    return None


def read_last_record(path: Path) -> Record | None:
    """Read the newest record from the end of the file."""
    return next((record for line in _lines_backwards(path) if (record := from_line(line))), None)


class RecordTail:
    """Reads the records that were added to a file since the last read, or with `skips_old`, since it was created."""

    def __init__(self, path: Path, *, skips_old: bool = False) -> None:
        self._path = path
        self._offset = 0
        if skips_old and path.is_file():
            self._offset = path.stat().st_size

    def read_new(self) -> Iterator[Record]:
        """Yield the records of new complete lines; a line counts as read once it was yielded."""
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset)
                for line in _short_lines(file):
                    if not line.endswith(b"\n"):
                        return
                    self._offset = file.tell()
                    record = from_line(line)
                    if record is not None:
                        yield record
        except OSError:
            return


def append_record(path: Path, record: Record, *, begins_line: bool = False) -> None:
    """Append a record in one write, so that a reader never sees half a line.

    `begins_line` tells that the write before this one failed, and may have left a part of a line. Raises `OSError` if
    it can't be written, or only in part.
    """
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * begins_line + to_line(record) + "\n")


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their line breaks, without those longer than `MAX_LINE_BYTES`."""
    try:
        with open_regular(path) as file:
            yield from _short_lines(file)
    except OSError:
        return


def _short_lines(file: IO[bytes]) -> Iterator[bytes]:
    is_inside = False
    while line := file.readline(MAX_LINE_BYTES):
        is_complete = line.endswith(b"\n") or len(line) < MAX_LINE_BYTES
        if is_complete and not is_inside:
            yield line
        is_inside = not is_complete


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file from last to first, reading growing tails of it up to `_MAX_TAIL_BYTES`."""
    tail_bytes = _TAIL_BYTES
    try:
        with open_regular(path) as file:
            start = size = file.seek(0, 2)
            end = max(0, size - _MAX_TAIL_BYTES)
            unfinished = b""
            while start > end and len(unfinished) < MAX_LINE_BYTES:
                start = max(end, size - tail_bytes)
                file.seek(start)
                chunk = file.read(size - start) + unfinished
                unfinished, *complete = chunk.split(b"\n") if start else [b"", *chunk.split(b"\n")]
                yield from reversed(complete)
                size, tail_bytes = start, min(tail_bytes * 8, MAX_LINE_BYTES)
    except OSError:
        return
