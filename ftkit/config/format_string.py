"""Format strings: text with `{column}` in it. Only a column's name may be between braces: no code, no widths."""

from __future__ import annotations

import string
from functools import lru_cache
from typing import Annotated

from pydantic import AfterValidator

_BRACES = "write {{ and }} for braces that belong to the text"


@lru_cache(maxsize=16)
def parse_format_string(text: str) -> tuple[tuple[str, str | None], ...]:
    """Split a format string into pieces: literal text, and the column that follows it (None after the last).

    Raises:
        ValueError: a brace is not closed, or has more between than a column's name.
    """
    try:
        pieces = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"not a format string ({error}): {_BRACES}") from error
    for _, column, specification, conversion in pieces:
        if column is None:
            continue
        written = (
            "{" + column + (f"!{conversion}" if conversion else "") + (f":{specification}" if specification else "")
        )
        if not column.strip():
            raise ValueError(f"{written}}} has no column's name: {_BRACES}")
        if specification or conversion or any(character in column for character in '.[]{}"'):
            raise ValueError(f"{written}}} is not a column's name in braces: {_BRACES}")
    return tuple((literal, column) for literal, column, _, _ in pieces)


def columns_of(text: str) -> list[str]:
    """Return the columns that a format string uses, in order."""
    return [column for _, column in parse_format_string(text) if column is not None]


def _check(text: str) -> str:
    parse_format_string(text)
    return text


FormatString = Annotated[str, AfterValidator(_check)]
"""A format string that was checked."""
