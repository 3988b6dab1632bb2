"""Read metrics.jsonl completely, thinned, or from its end, and append to it.

metrics.index next to it has the byte offset of each record that is not a step, so that readers of a file of gigabytes
can read only these records and some steps. An index whose first line is not 0 is not used.

Reading never raises and takes bounded memory, whatever the files contain: run folders are shared, and a damaged one
must not hide the others.
"""

from __future__ import annotations

import io
import math
import re
from bisect import bisect_left
from collections.abc import Iterator
from itertools import cycle, pairwise
from pathlib import Path
from typing import IO

from ftkit.errors import one_line, plural
from ftkit.files import DamagedFileError, PrivateFileError, open_regular, read_small
from ftkit.runs.records import EvaluationRecord, Record, StartRecord, StepRecord, from_line, is_damaged, to_line

MAX_LINE_BYTES = 2**23
"""Longer lines are skipped: the longest records, evaluations with samples, take a few hundred KiB."""
_MAX_TAIL_BYTES = 2**26  # maximum bytes at the end of a file to search for its newest record
_TAIL_BYTES = 2**14  # bytes that this search reads first

LARGE_BYTES = 2**25  # smaller files are read completely
_NEIGHBOR_BYTES = 2**12
_NUM_SAMPLED = 250  # approximate number of steps in a thinned file, at most twice this
_STEP, _NUM_STEPS_IN_LINE = re.compile(rb'"step": (\d+)'), re.compile(rb'"num_steps": (\d+)')

_STEP_LINE, _START_LINE = b'{"event": "step"', b'{"event": "start"'
"""The first characters of the records of steps and starts, as `to_line` writes them."""


def read_records(path: Path, *, skips_steps: bool = False) -> list[Record]:
    """Read the records of a run as `scan_records` does; empty if there are none yet."""
    found: list[Record] = []
    scan_records(path, records=found, skips_steps=skips_steps)
    return found


def read_evaluations(path: Path) -> list[EvaluationRecord]:
    """Read all evaluations of a run, without parsing its steps."""
    return [record for record in read_records(path, skips_steps=True) if isinstance(record, EvaluationRecord)]


def read_job_evaluations(metrics: Path, evaluations: Path) -> list[EvaluationRecord]:
    """Return evaluations by separate jobs that the trainer has not copied into metrics.jsonl yet."""
    records = read_evaluations(evaluations)
    known = {(each.step, each.time) for each in read_evaluations(metrics)} if records else set()
    return [record for record in records if (record.step, record.time) not in known]


def scan_records(
    path: Path, *, tail_bytes: int | None = None, records: list[Record] | None = None, skips_steps: bool = False
) -> str:
    """Append readable records to `records`; return which can't be read, and why: empty if all can, or without a file.

    Readers skip such records, so a run with an unreadable file would look as if it had not started. With `tail_bytes`,
    only lines in that many bytes at the end of the file are checked; with `skips_steps`, not the steps after the first
    one of each start. In a large file with an index, only some steps are checked and appended.
    """
    num_damaged, where, has_step = 0, "", False
    thinned = _thinned(path, skips_steps=skips_steps) if records is not None else None
    try:
        with io.BytesIO(b"".join(thinned)) if thinned else open_regular(path) as file:
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
    """Read the newest step's record from the end of the file; ignore steps that a later start repeats."""
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
    """Reads records added to a file since the last read; `skips_old` skips records that exist at construction."""

    def __init__(self, path: Path, *, skips_old: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if skips_old and path.is_file() else 0

    def read_new(self) -> Iterator[Record]:
        """Yield the records of new complete lines; a line counts as read after it is yielded."""
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset)
                for line in _short_lines(file):
                    if not line.endswith(b"\n"):
                        return
                    self._offset = file.tell()
                    if (record := from_line(line)) is not None:
                        yield record
        except OSError:
            return


def append_record(path: Path, record: Record, *, begins_line: bool = False) -> None:
    """Append a record in one write, so that a reader never sees half a line.

    `begins_line` tells that the previous write failed and may have left part of a line. Raises `OSError` if the record
    can't be written completely.
    """
    with path.open("ab") as file:
        if not isinstance(record, StepRecord):  # index first: if this process is killed, it lacks no record
            with path.with_suffix(".index").open("a", encoding="ascii") as index:
                index.write(f"{file.tell() + begins_line}\n")
        file.write(("\n" * begins_line + to_line(record) + "\n").encode())


# --- Thinned -------------------------------------------------------------------------------------


def _thinned(path: Path, *, skips_steps: bool) -> list[bytes] | None:
    """Return a large file's lines that are not steps, the lines around them, and, unless skipped, some other steps.

    None if the file is small or has no index.
    """
    try:
        places = sorted({int(place) for place in read_small(path.with_suffix(".index"), 2**28).split()})
        with open_regular(path) as file:
            size = file.seek(0, 2)
            if size < LARGE_BYTES or places[0] != 0:
                return None
            found: dict[int, bytes] = {}
            for place in (*places, size):
                file.seek(max(0, place - _NEIGHBOR_BYTES))
                *_, before, rest = (b"\n\n" + file.read(place - file.tell())).split(b"\n")
                if rest and place < size:
                    return None  # the index is that of another file
                if before.startswith(_STEP_LINE):
                    found[place - len(rest) - len(before) - 1] = before + b"\n"
                found |= {file.tell(): file.readline(MAX_LINE_BYTES) for _ in range(2)}
            starts = [place for place in places if found.get(place, b"").startswith(_START_LINE)]
            for low, high in pairwise([*starts, size] * (not skips_steps)):
                found |= _some_steps(file, low, high)
    except (OSError, ValueError, IndexError):
        return None
    return [found[place] for place in sorted(found)]


def _some_steps(file: IO[bytes], low: int, high: int) -> Iterator[tuple[int, bytes]]:
    """Yield offsets and lines of some steps of one start; runs of the same length yield the same steps."""

    def find(place: int) -> tuple[float, int, bytes]:
        """Return the first step that begins at or after an offset, with its own offset and its line."""
        file.seek(max(low, place - 1))
        if place > low:
            file.readline()  # the rest of the line before
        while (at := file.tell()) < high:
            line = file.readline(MAX_LINE_BYTES)
            if line.startswith(_STEP_LINE) and (step := _STEP.search(line)):
                return int(step[1]), at, line
        return math.inf, high, b""

    step, place, line = find(low)
    num_steps = _NUM_STEPS_IN_LINE.search(line)
    stride, factors = 1, cycle((2.0, 2.5, 2.0))  # 1, 2, 5, 10, 20, …
    while num_steps and int(num_steps[1]) > stride * _NUM_SAMPLED:
        stride = int(stride * next(factors))
    while place < high:
        yield place, line
        following = (step // stride + 1) * stride
        step, place, line = find(bisect_left(range(high), following, lo=place, key=lambda at: find(at)[0]))


def _short_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file with their line breaks, without those longer than `MAX_LINE_BYTES`."""
    is_inside = False
    while line := file.readline(MAX_LINE_BYTES):
        is_complete = line.endswith(b"\n") or len(line) < MAX_LINE_BYTES
        if is_complete and not is_inside:
            yield line
        is_inside = not is_complete


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file from last to first, by reading growing tails up to `_MAX_TAIL_BYTES`."""
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
