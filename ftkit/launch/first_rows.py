"""The rows of a recipe's data that can be read before a job is submitted: the first of files, some generated ones."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ftkit.config.data import AutoFormat, describe_format
from ftkit.config.sources import HubSource
from ftkit.data.formats import DETECTION_ROWS, resolve_format
from ftkit.data.sources import first_rows, peek_rows
from ftkit.errors import FtkitError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.config.data import DataSpec, Format
    from ftkit.data.rows import Row


def read_available(data: DataSpec) -> Iterator[tuple[Row, Format]]:
    """Yield the rows that can be read from here, with their format."""
    with suppress(UnreachableError):  # `check_examples` warns
        yield from with_formats(data, peek_rows(data))


def with_formats(data: DataSpec, rows: list[Row]) -> Iterator[tuple[Row, Format]]:
    """Yield rows with their format; each source of a mixture may have its own."""
    if not rows:
        return
    if isinstance(data.format, AutoFormat) and len(data.sources) > 1:
        local = [number for number, source in enumerate(data.sources) if not isinstance(source, HubSource)]
        groups = [first_rows(data, number, DETECTION_ROWS) for number in local]
    else:
        groups = [rows]
    for group in groups:
        form = resolve_format(data.format, group[:DETECTION_ROWS])
        yield from ((row, form) for row in group)


def describe_detected(data: DataSpec) -> str:
    """Describe the formats that the first rows of a recipe's data have, if the recipe sets none, in one line."""
    try:
        forms = [describe_format(form) for _, form in read_available(data)]
    except FtkitError:
        return "of no known format"  # the checks report why
    return f"{', '.join(dict.fromkeys(forms))} (detected)" if forms else "format detected once rows are read"
