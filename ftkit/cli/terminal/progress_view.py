"""Show the progress of a long operation: bars on a terminal, one line per stage elsewhere."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ftkit.cli.terminal.console import Terminal
    from ftkit.images.events import ProgressEvent


class _OfBytes(ProgressColumn):
    """A column that is empty for tasks that don't count bytes."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> RenderableType:
        return self._column.render(task) if task.fields["counts"] else Text()


class ProgressView(ExitStack):
    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal
        self._stage = ""
        self._last_text = ""
        self._tasks: dict[str, TaskID] = {}
        one_line = Column(no_wrap=True, overflow="ellipsis")
        self._bars = Progress(
            _OfBytes(BarColumn(bar_width=30)),
            _OfBytes(DownloadColumn(binary_units=True)),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}", style="dim", markup=False, table_column=one_line),
            console=terminal.talk,
            transient=True,
            disable=not terminal.is_live,
        )
        self.enter_context(self._bars)

    def report(self, progress: ProgressEvent) -> None:
        if progress.stage != self._stage:
            self._stage = progress.stage
            self._last_text = ""
            for task in self._tasks.values():
                self._bars.remove_task(task)
            self._tasks.clear()
            self._terminal.say(progress.stage)
        if progress.text and not progress.item and progress.done is None:
            if progress.text != self._last_text:
                self._last_text = progress.text
                self._terminal.say(progress.text, indent=2)
        elif self._terminal.is_live:
            self._draw(progress)

    def _draw(self, progress: ProgressEvent) -> None:
        key = progress.item
        if progress.is_over:
            if key in self._tasks:
                self._bars.remove_task(self._tasks.pop(key))
            return
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task("", total=None, text="", counts=False)
        self._bars.update(
            self._tasks[key],
            completed=progress.done or 0,
            total=progress.total,
            text=progress.text,
            counts=progress.done is not None,
        )
