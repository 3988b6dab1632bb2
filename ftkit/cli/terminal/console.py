"""The one class that wraps rich: data to stdout, messages to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import IO

import click
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ftkit.cli.output import current_output, in_color, styled
from ftkit.cli.terminal.format import finite, printable
from ftkit.errors import redact

_UNLIMITED = 10_000
_ROOMY = 110
_GAP = 2
_MIN_WIDTH = 6


@dataclass(frozen=True)
class Styled:
    text: str
    style: str


Cell = str | Styled
Facts = list[tuple[str, Cell | Sequence[Styled]]]
"""Names with their values, which may have parts in several styles."""


class Terminal:
    """Prints data for programs to stdout, and messages for people to stderr."""

    @cached_property
    def talk(self) -> Console:
        """The console of stderr for all but warnings; `--quiet` silences it."""
        return _console(sys.stderr, quiet=current_output().quiet)

    @cached_property
    def _out(self) -> Console:
        return _console(sys.stdout)

    @property
    def is_live(self) -> bool:
        """Whether messages go to a terminal that can be redrawn."""
        return self.talk.is_terminal and not self.talk.is_dumb_terminal and not self.talk.quiet

    @property
    def is_screen(self) -> bool:
        return self._out.is_terminal and not self._out.is_dumb_terminal

    @property
    def is_roomy(self) -> bool:
        return self._out.width >= _ROOMY

    @contextmanager
    def full_screen(self) -> Iterator[Callable[[], None]]:
        """Take the whole screen; yield a function that clears it."""
        with self._out.screen(hide_cursor=True):
            yield self._out.clear

    def data(self, text: str) -> None:
        """Write data to stdout as UTF-8, whatever the locale: unchanged for a program, escaped on a terminal."""
        sys.stdout.flush()
        shown = printable(text) if sys.stdout.isatty() else text
        sys.stdout.buffer.write(shown.encode(errors="backslashreplace"))
        sys.stdout.buffer.flush()

    def json(self, values: object) -> None:
        """Write JSON to stdout, with null for numbers that JSON does not have."""
        self.data(json.dumps(finite(values), indent=2) + "\n")

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[Cell]], *, is_data: bool = True) -> None:
        """Write a table: to stdout if it is the command's data, else to stderr.

        Titles of columns with numbers begin with `#`; those of columns that a narrow terminal truncates end with `…`.
        """
        console = self._out if is_data else self.talk
        _print(console, Segments(_table_segments(titles, rows, console.width)))

    def facts(self, rows: Sequence[tuple[str, Cell | Sequence[Styled]]], *, is_data: bool) -> None:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in rows:
            parts = (value,) if isinstance(value, str | Styled) else value
            grid.add_row(_text(name), Text.assemble(*map(_text, parts)))
        _print(self._out if is_data else self.talk, grid)

    def text(self, cell: Cell = "", *, is_data: bool = True) -> None:
        _print(self._out if is_data else self.talk, _text(cell))

    def say(self, cell: Cell = "", *, indent: int = 0) -> None:
        _print(self.talk, Padding(_text(cell), (0, 0, 0, indent), expand=False) if indent else _text(cell))

    def warn(self, text: str) -> None:
        """Write a warning to stderr, without secrets: many warnings quote the environment."""
        console = _console(sys.stderr) if self.talk.quiet else self.talk
        _print(console, _text(Styled(f"warning: {redact(text, os.environ)}", "yellow")))

    def confirm(self, question: str, *, yes: bool) -> bool:
        """Ask a question on stderr, which `--yes` answers; say so if nothing will be done."""
        try:
            if yes or click.confirm(question, err=True):
                return True
        except click.Abort:
            if sys.stdin.isatty():
                raise
            self.say()
            raise click.UsageError("nobody answers here: give --yes", click.get_current_context()) from None
        self.say("nothing was changed")
        return False


class _EscapingConsole(Console):
    """Escapes all text but the control codes and styles that rich itself adds."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for each in super().render(renderable, options):
            yield each if each.control else Segment(printable(each.text), each.style)


def _console(stream: IO[str], *, quiet: bool = False) -> Console:
    is_terminal, colored = stream.isatty(), in_color(stream)
    return _EscapingConsole(
        file=styled(stream), quiet=quiet, force_terminal=is_terminal,
        color_system="auto" if is_terminal else "standard" if colored else None, no_color=not colored,
        width=None if is_terminal else _UNLIMITED, markup=False, highlight=False, emoji=False,
    )  # fmt: skip


def _text(cell: Cell) -> Text:
    return Text(printable(cell)) if isinstance(cell, str) else Text(printable(cell.text), style=cell.style)


def _print(console: Console, renderable: RenderableType) -> None:
    """Print; in a pipe, drop rich's padding at line ends, and let BrokenPipeError through."""
    if console.is_terminal:
        console.print(renderable)
        return
    with console.capture() as capture:
        console.print(renderable)
    for line in capture.get().splitlines():
        click.echo(line.rstrip(), file=console.file, color=in_color(console.file))


# --- Tables of many rows: rich's layout takes most of a second for a thousand rows ------------


def _table_segments(titles: Sequence[str], rows: Sequence[Sequence[Cell]], width: int) -> Iterator[Segment]:
    """Lay out a table, one line per row, no wider than `width` if the columns that can shrink allow it."""
    lines = [[Styled(title.strip("#…"), "bold") for title in titles], *rows]
    widths = [max(map(cell_len, map(_one_line, column))) for column in zip(*lines, strict=True)]
    for _ in range(sum(widths) + _GAP * (len(widths) - 1) - width):  # shrink the widest that can
        room, index = max(((widths[i], i) for i, title in enumerate(titles) if title.endswith("…")), default=(0, 0))
        if room <= _MIN_WIDTH:
            break
        widths[index] -= 1
    last = len(titles) - 1
    styles: dict[str, Style] = {}
    for line in lines:
        for index, (cell, title, room) in enumerate(zip(line, titles, widths, strict=True)):
            text = _one_line(cell)
            if cell_len(text) > room:
                text = set_cell_size(text, room - 1) + "…"
            blank, is_number = " " * (room - cell_len(text)), title.startswith("#")
            if is_number:
                yield Segment(blank)
            style = cell.style if isinstance(cell, Styled) else ""
            yield Segment(text, styles.setdefault(style, Style.parse(style)) if style else None)
            if index != last:
                yield Segment(" " * _GAP if is_number else blank + " " * _GAP)
        yield Segment.line()


def _one_line(cell: Cell) -> str:
    return " ".join(printable(cell if isinstance(cell, str) else cell.text).split("\n"))
