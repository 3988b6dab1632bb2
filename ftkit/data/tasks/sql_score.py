"""Score a model's SQL by execution: compare its rows with the reference's."""

from __future__ import annotations

import re
import sqlite3
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ftkit.data.tasks.text_to_sql import Example
from ftkit.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Far above the needs of a question on small tables, far below an unacceptable wait or a node's memory.
MAX_INSTRUCTIONS = 1_000_000
MAX_SECONDS = 5.0
"""CPU seconds of this thread, since one instruction may search a long text; wall time would depend on the load."""
INSTRUCTIONS_PER_CHECK = 100
MAX_VALUE_BYTES = 10_000
"""Maximum size of a text, a blob or a row. Sorting keeps all rows that the instructions make, but few in memory."""
MAX_COLUMNS = 256
MAX_ROWS = 10_000
MAX_RESULT_BYTES = 1_000_000

Rows = list[tuple[object, ...]]

_SQL_ERRORS = (sqlite3.Error, sqlite3.Warning, ValueError)
_READ_ACTIONS = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
# VACUUM INTO needs ATTACH too: without it no statement can access a file.
_FILE_ACTIONS = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA}


class Outcome(StrEnum):
    """Outcome of a prediction."""

    MATCH = "match"
    WRONG_ROWS = "wrong rows"
    PREDICTION_FAILED = "prediction failed"
    REFERENCE_FAILED = "reference failed"


@dataclass(frozen=True)
class ExecutionMatch:
    """The outcome of one prediction; `message` is sqlite's error, if any."""

    outcome: Outcome
    message: str = ""

    @property
    def matched(self) -> bool:
        """Whether the prediction returned the reference's rows."""
        return self.outcome is Outcome.MATCH


def read_question(columns: Mapping[str, Any]) -> Example:
    """Read a question from the columns of an example of any source.

    Raises:
        DataError: it lacks a column that scoring needs.
    """
    missing = [name for name in ("sql_prompt", "sql_context", "sql") if columns.get(name) is None]
    if missing:
        raise DataError(
            f"evaluation.sql_execution needs a column that is missing or null: {', '.join(missing)}",
            meaning=f"the data has: {', '.join(sorted(columns))}",
            fix="rename the columns of the validation examples, or remove evaluation.sql_execution",
        )
    texts = {field.name: str(columns.get(field.name) or "") for field in fields(Example)}
    return Example(**texts)


def execution_match(example: Example, predicted_sql: str) -> ExecutionMatch:
    """Execute reference and prediction, and compare their rows; bad SQL never raises.

    The order of rows counts only if the reference sorts them.
    """
    with closing(sqlite3.connect(":memory:")) as database:
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        database.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, MAX_COLUMNS)
        try:
            _fill(database, example)
            reference = _select(database, example.sql)
        except _SQL_ERRORS as error:
            return ExecutionMatch(Outcome.REFERENCE_FAILED, str(error))
        try:
            predicted = _select(database, predicted_sql)
        except _SQL_ERRORS as error:
            return ExecutionMatch(Outcome.PREDICTION_FAILED, str(error))
    is_same = _same_rows(predicted, reference, is_ordered=_has_order_by(example.sql))
    return ExecutionMatch(Outcome.MATCH if is_same else Outcome.WRONG_ROWS)


def _fill(database: sqlite3.Connection, example: Example) -> None:
    _limit_work(database)
    database.set_authorizer(_deny_files)
    database.executescript(f"{example.sql_context}\n;{example.sql_fixture}")


def _select(database: sqlite3.Connection, sql: str) -> Rows:
    _limit_work(database)
    database.set_authorizer(_allow_reading)
    cursor = database.execute(sql)
    if cursor.description is None:
        raise sqlite3.ProgrammingError("not a SELECT")
    rows: Rows = []
    num_bytes = 0
    for row in cursor:
        rows.append(row)
        num_bytes += sum(len(cell) if isinstance(cell, str | bytes) else 8 for cell in row)
        if len(rows) > MAX_ROWS or num_bytes > MAX_RESULT_BYTES:
            raise sqlite3.DataError(f"more than {MAX_ROWS:,} rows or {MAX_RESULT_BYTES:,} bytes")
    return rows


def _limit_work(database: sqlite3.Connection) -> None:
    """Interrupt statements of this connection that run for too long from now on."""
    checks = iter(range(MAX_INSTRUCTIONS // INSTRUCTIONS_PER_CHECK))
    end = time.thread_time() + MAX_SECONDS

    def is_too_long() -> bool:
        return next(checks, None) is None or time.thread_time() > end

    database.set_progress_handler(is_too_long, INSTRUCTIONS_PER_CHECK)


def _deny_files(action: int, *_: str | None) -> int:
    return sqlite3.SQLITE_DENY if action in _FILE_ACTIONS else sqlite3.SQLITE_OK


def _allow_reading(action: int, *_: str | None) -> int:
    return sqlite3.SQLITE_OK if action in _READ_ACTIONS else sqlite3.SQLITE_DENY


def _same_rows(rows: Rows, others: Rows, *, is_ordered: bool) -> bool:
    left, right = (([tuple(map(_rounded, row)) for row in r]) for r in (rows, others))
    return left == right if is_ordered else Counter(left) == Counter(right)


def _rounded(cell: object) -> object:
    """Round away the digits that depend on sqlite's order of summation."""
    return float(f"{cell:.9g}") if isinstance(cell, float) else cell


def _has_order_by(sql: str) -> bool:
    """Return whether there is an ORDER BY outside of texts, subqueries and window functions."""
    sql = re.sub(r"'(?:[^']|'')*'", "", sql)
    num_removed = 1
    while num_removed:
        sql, num_removed = re.subn(r"\([^()]*\)", "", sql)
    return re.search(r"\border\s+by\b", sql, re.IGNORECASE) is not None
