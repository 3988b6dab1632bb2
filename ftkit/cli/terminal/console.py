"""The one class that wraps rich: data to stdout, talk to stderr, colours only on a terminal."""

from __future__ import annotations

import json
import os
import sys
from typing import IO, TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.padding import Padding
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from ftkit.cli.terminal.format import printable
from ftkit.cli.terminal.table import Cell, Column, Styled, table_segments
from ftkit.errors import redact

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

__all__ = ["Cell", "Column", "Styled", "Terminal"]

_UNLIMITED = 10_000
_ROOMY = 110


class Terminal:
    """Prints for people and for programs."""

    def __init__(self) -> None:
        self._out = _console(sys.stdout)
        self.talk = _console(sys.stderr)

    @property
    def is_live(self) -> bool:
        """Whether talk goes to a screen that can be redrawn."""
        return self.talk.is_terminal and not self.talk.is_dumb_terminal

    @property
    def is_roomy(self) -> bool:
        """Whether data may take long lines."""
        return self._out.width >= _ROOMY

    def data(self, text: str) -> None:
        """Write to stdout exactly this, as UTF-8: click would leave out escape sequences, an old locale more."""
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()

    def json(self, values: Any) -> None:
        """Write JSON to stdout."""
        self.data(json.dumps(values, indent=2) + "\n")

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
        """Write a table to stdout."""
        _print(self._out, Segments(table_segments(columns, rows, self._out.width)))

    def facts(self, rows: Sequence[tuple[str, Cell]], *, is_data: bool) -> None:
        """Write names with their values, to stdout if that is what was asked for, else to stderr."""
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in rows:
            grid.add_row(_text(name), _text(value))
        _print(self._out if is_data else self.talk, grid)

    def text(self, cell: Cell = "", *, is_data: bool) -> None:
        """Write a paragraph, to stdout if that is what was asked for, else to stderr."""
        _print(self._out if is_data else self.talk, _text(cell))

    def say(self, cell: Cell = "", *, indent: int = 0) -> None:
        """Write a paragraph to stderr."""
        _print(self.talk, Padding(_text(cell), (0, 0, 0, indent), expand=False) if indent else _text(cell))

    def warn(self, text: str) -> None:
        """Write a warning to stderr, without secrets: many quote the environment."""
        self.say(Styled(f"warning: {redact(text, os.environ)}", "yellow"))


def _console(stream: IO[str]) -> Console:
    console = Console(file=stream, markup=False, highlight=False, emoji=False)
    return console if console.is_terminal else Console(file=stream, width=_UNLIMITED, highlight=False, markup=False)


def _text(cell: Cell) -> Text:
    return Text(printable(cell)) if isinstance(cell, str) else Text(printable(cell.text), style=cell.style)


def _print(console: Console, renderable: RenderableType) -> None:
    """Print; into a pipe without rich's padding at line ends, and with broken pipes passed on."""
    if console.is_terminal:
        console.print(renderable)
        return
    with console.capture() as capture:
        console.print(renderable)
    for line in capture.get().splitlines():
        click.echo(line.rstrip(), file=console.file)
