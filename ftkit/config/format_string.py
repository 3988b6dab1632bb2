"""Text with an example's columns in it: format strings, where only a column's name may be between braces, and Jinja."""

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


@lru_cache(maxsize=16)
def variables_of(text: str) -> list[str]:
    """Return the variables that a Jinja template reads, in alphabetical order.

    Raises:
        ValueError: it is no Jinja template.
    """
    import jinja2.meta  # noqa: PLC0415 - only recipes with a template need it

    try:
        parsed = jinja2.Environment(autoescape=False, extensions=["jinja2.ext.loopcontrols"]).parse(text)  # noqa: S701
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"not a Jinja template: line {error.lineno}: {error.message}") from error
    return sorted(jinja2.meta.find_undeclared_variables(parsed))


def _check_jinja(text: str) -> str:
    if not variables_of(text):
        raise ValueError("no column is in this Jinja template: write {{ column }}")
    return text


def is_inline_template(text: str) -> bool:
    """Tell the text of a Jinja template from the name of a template or a file."""
    return "{{" in text or "{%" in text


JinjaText = Annotated[str, AfterValidator(_check_jinja)]
"""A Jinja template over columns that was checked."""
