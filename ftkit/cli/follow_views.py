"""Two ways to show a run that goes on: a bar on a screen, lines in a log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from ftkit.cli.record_lines import record_line
from ftkit.cli.wording import count, duration
from ftkit.launch.states import RunState
from ftkit.records import EndRecord, StageRecord, StartRecord, StepRecord

if TYPE_CHECKING:
    from ftkit.cli.terminal import Terminal
    from ftkit.launch.states import Observation
    from ftkit.records import Record

_REDRAWS_PER_SECOND = 4


class FollowView(Protocol):
    """Shows what happens to a run."""

    def state(self, seen: Observation) -> None:
        """The run is in this state; called each time that it was asked for."""

    def record(self, record: Record) -> None:
        """The trainer wrote this."""

    def close(self) -> None:
        """Nothing more will come."""


def view_for(terminal: Terminal) -> FollowView:
    """Return the view that fits the terminal."""
    return LiveView(terminal) if terminal.is_live else PlainView(terminal)


def state_words(seen: Observation) -> str:
    """Say the state and why."""
    return f"{seen.state}: {seen.reason}" if seen.reason else str(seen.state)


class PlainView:
    """A line for each thing that happens."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._shown = ""

    def state(self, seen: Observation) -> None:
        """Print the state if it is another than before."""
        words = state_words(seen)
        if words != self._shown:
            self._terminal.say(words)
            self._shown = words

    def record(self, record: Record) -> None:
        """Print a line."""
        self._terminal.say(record_line(record))

    def close(self) -> None:
        """Do nothing: each line is complete."""


class LiveView:
    """One bar for the steps; a line above it for whatever is not a step."""

    def __init__(self, terminal: Terminal) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=terminal.talk,
            expand=True,
            transient=True,
            refresh_per_second=_REDRAWS_PER_SECOND,
        )
        self._task = self._progress.add_task("submitted", total=None, numbers="")
        self._is_training = False
        self._progress.start()

    def state(self, seen: Observation) -> None:
        """Show the state while the run waits; once it runs, its records tell more."""
        if seen.state is not RunState.RUNNING:
            self._is_training = False
            self._progress.reset(self._task, total=None, description=state_words(seen), numbers="")
        elif not self._is_training:
            waiting = str(self._progress.tasks[0].description)
            if waiting.startswith((RunState.PENDING, RunState.STOPPED, "submitted")):
                self._progress.update(self._task, description="running")

    def record(self, record: Record) -> None:
        """Move the bar, or print a line above it."""
        if isinstance(record, StepRecord):
            self._is_training = True
            self._progress.update(
                self._task,
                description="training",
                total=record.num_steps,
                completed=record.step,
                numbers=_numbers(record),
            )
            return
        self._progress.console.print(record_line(record))
        if isinstance(record, StageRecord):
            self._progress.update(self._task, description=record.stage)
        if isinstance(record, StartRecord):
            self._progress.update(self._task, total=record.num_steps, completed=record.resumed_from)
        if isinstance(record, EndRecord):
            self._progress.update(self._task, description=record.outcome)

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()


def _numbers(record: StepRecord) -> str:
    left = duration((record.num_steps - record.step) * record.step_seconds)
    speed = f"{count(record.tokens_per_second)} tok/s"
    return f"{record.step}/{record.num_steps} loss {record.loss:.3f} {speed} {left} left"
