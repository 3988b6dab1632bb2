"""Tables of many rows: laid out here, because rich takes most of a second for a thousand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style

from ftkit.cli.terminal.format import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_GAP = 2
_LEAST_WIDTH = 6


@dataclass(frozen=True)
class Styled:
    """A text with a style of rich."""

    text: str
    style: str


Cell = str | Styled


@dataclass(frozen=True)
class Column:
    """A column of a table: `takes_cut` is for those that give way when the screen is narrow."""

    title: str
    is_number: bool = False
    takes_cut: bool = False


def table_segments(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int) -> Iterator[Segment]:
    """Lay out a table, one line a row, no wider than `width` if the columns that may be cut allow it."""
    lines = [[Styled(column.title, "bold") for column in columns], *rows]
    widths = _widths(columns, [[cell_len(_text(cell)) for cell in line] for line in lines], width)
    last = len(columns) - 1
    styles: dict[str, Style] = {}
    for line in lines:
        for index, (cell, column, room) in enumerate(zip(line, columns, widths, strict=True)):
            text = _fit(_text(cell), room)
            blank = " " * (room - cell_len(text))
            if column.is_number:
                yield Segment(blank)
            style = cell.style if isinstance(cell, Styled) else ""
            yield Segment(text, styles.setdefault(style, Style.parse(style)) if style else None)
            if index != last:
                yield Segment(" " * _GAP if column.is_number else blank + " " * _GAP)
        yield Segment.line()


def _widths(columns: Sequence[Column], lengths: list[list[int]], width: int) -> list[int]:
    """Give each column what it needs; take what is too much from the widest that may be cut."""
    widths = [max(column) for column in zip(*lengths, strict=True)]
    for _ in range(sum(widths) + _GAP * (len(widths) - 1) - width):
        room, index = max(((widths[i], i) for i, column in enumerate(columns) if column.takes_cut), default=(0, 0))
        if room <= _LEAST_WIDTH:
            break
        widths[index] -= 1
    return widths


def _fit(text: str, room: int) -> str:
    return text if cell_len(text) <= room else set_cell_size(text, room - 1) + "…"


def _text(cell: Cell) -> str:
    return " ".join(printable(cell if isinstance(cell, str) else cell.text).split("\n"))
