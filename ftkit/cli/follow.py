"""Follow a run until it ends: read its records often, poll its scheduler less often."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from ftkit.cli.report import write_report_at_end
from ftkit.cli.terminal.format import count, duration
from ftkit.cli.terminal.record_lines import record_line
from ftkit.cli.terminal.report import show_end
from ftkit.errors import FtkitError, RunFailedError
from ftkit.runs.ends import excluded_nodes
from ftkit.runs.job import Job, RunState
from ftkit.runs.metrics_file import RecordTail
from ftkit.runs.records import EndRecord, MemoryRecord, ScriptStepRecord, StageRecord, StartRecord, StepRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.cli.terminal.console import Terminal
    from ftkit.runs.job import SubmittedRun
    from ftkit.runs.records import Record

_READ_SECONDS = 0.3
_LOST_SECONDS = 60
_REDRAWS_PER_SECOND = 4
_SECONDS_BETWEEN_STEPS = 30


def follow(run: SubmittedRun, terminal: Terminal, tail: RecordTail | None = None) -> None:
    """Follow a run until it ends, then show its results.

    Args:
        run: the run.
        terminal: where to show it.
        tail: reader of its records; from the first one if null.

    Raises:
        RunFailedError: it failed or was canceled.
        KeyboardInterrupt: the user stops following; the run continues.
    """
    tail = tail or RecordTail(run.layout.metrics)
    view = view_for(terminal)
    try:
        seen = _show_until_the_end(run, tail, view)
    except KeyboardInterrupt:
        view.close()
        terminal.say(f"\n{run.id} continues. To follow or cancel it:")
        terminal.say(f"  ftkit status {run.id} --follow\n  ftkit cancel {run.id}")
        raise
    finally:
        view.close()
    with suppress(FtkitError):  # a missing report does not fail the run
        write_report_at_end(run.layout, seen.state)
    show_end(run, seen, terminal)


def _show_until_the_end(run: SubmittedRun, tail: RecordTail, view: FollowView) -> Job:
    last = Job(run.job_id, RunState.UNKNOWN)
    known = excluded_nodes(run.layout)
    for seen in poll_states(run):
        if seen:
            now = excluded_nodes(run.layout)
            for host in [host for host in now if host not in known]:
                view.note(f"excluded {host}: {now[host]}")
            known = now
            view.state(seen)
            last = seen
        for record in tail.read_new():  # after the state, so that no record from before a final state is missed
            view.record(record)
    return last


def poll_states(run: SubmittedRun) -> Iterator[Job | None]:
    """Yield the state after each poll of the scheduler, and None in between, when it is time to read the records.

    Ends after a final state.

    Raises:
        RunFailedError: the scheduler has not known the job for a minute.
    """
    from ftkit.launch.job_states import observe_all
    from ftkit.launch.scheduler import scheduler_for

    pause = scheduler_for(run.submission.scheduler).poll_seconds
    last_known = time.monotonic()
    while True:
        overview = observe_all([run])
        seen = overview.states[run.id]
        yield seen
        if seen.is_final:
            return
        polled = time.monotonic()
        if seen.state is not RunState.UNKNOWN or overview.warnings:
            last_known = polled
        elif polled - last_known > _LOST_SECONDS:
            raise RunFailedError(f"lost track of {run.id}: {seen.reason}", fix=f"read its log: ftkit logs {run.id}")
        while time.monotonic() < polled + pause:
            time.sleep(_READ_SECONDS)
            yield None


class FollowView(Protocol):
    """Shows the progress of a run."""

    def state(self, seen: Job) -> None:
        """Show the run's state; called after each poll."""

    def note(self, text: str) -> None:
        """Show a message about the job."""

    def record(self, record: Record) -> None:
        """Show a record of the trainer."""

    def close(self) -> None:
        """Close the view: no record follows."""


def view_for(terminal: Terminal) -> FollowView:
    """Return the view that fits the terminal."""
    return LiveView(terminal) if terminal.is_live else PlainView(terminal)


class PlainView:
    """Lines, few enough for the log of a CI job; memory records are only in the run's log."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._shown = ""
        self._next_step = 0.0

    def state(self, seen: Job) -> None:
        """Print the state if it changed, unless the run is completed: the summary shows that."""
        words = str(seen)
        if words != self._shown and seen.state is not RunState.COMPLETED:
            self._terminal.say(words)
            self._shown = words

    def note(self, text: str) -> None:
        """Print a line."""
        self._terminal.say(text)

    def record(self, record: Record) -> None:
        """Print a line; for steps, the first, the last, and one every half minute of the run."""
        if isinstance(record, MemoryRecord):
            return
        if isinstance(record, StepRecord):
            if record.time < self._next_step and record.step != record.num_steps:
                return
            self._next_step = record.time + _SECONDS_BETWEEN_STEPS
        self._terminal.say(record_line(record))

    def close(self) -> None:
        """Do nothing: every line is complete."""


class LiveView:
    """A progress bar for the steps; a line above it for every other record."""

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
        self._is_waiting = True
        self._stage: StageRecord | None = None
        self._is_first_step = False
        self._progress.start()

    def state(self, seen: Job) -> None:
        """Show the state until the run runs; then its records show more."""
        if seen.state is not RunState.RUNNING:
            self._show_waiting(str(seen))
        elif self._is_waiting:
            self._show_waiting("running")
        self._is_waiting = seen.state is not RunState.RUNNING

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text)

    def record(self, record: Record) -> None:
        """Move the bar, or print a line above it. Memory records are only in the run's log."""
        if isinstance(record, MemoryRecord):
            return
        self._finish_stage(record)
        if isinstance(record, ScriptStepRecord):
            self._show_waiting(record_line(record))
            return
        if isinstance(record, StepRecord):
            self._progress.update(
                self._task,
                description="training",
                total=record.num_steps,
                completed=record.step,
                numbers=_numbers(record, is_first=self._is_first_step),
            )
            self._is_first_step = False
            return
        self._is_first_step |= isinstance(record, StartRecord)
        if isinstance(record, StageRecord):
            self._stage = record
            self._show_waiting(record.stage)
            return
        self._progress.console.print(record_line(record))
        if isinstance(record, EndRecord):
            self._show_waiting(record.outcome)

    def _show_waiting(self, description: str) -> None:
        """Let the bar pulse while there is no step to count."""
        self._progress.tasks[0].total = None
        self._progress.update(self._task, description=description, completed=0, numbers="")

    def _finish_stage(self, record: Record) -> None:
        """Move a stage from the bar to a separate line once the next one starts."""
        if self._stage:
            seconds = record.time - self._stage.time
            took = f" ({duration(seconds)})" if seconds >= 1 else ""
            self._progress.console.print(f"{self._stage.stage}{took}")
            self._stage = None

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()


def _numbers(record: StepRecord, *, is_first: bool) -> str:
    """Describe a step; how much time is left is unknown from the first record of a start, which includes compiling."""
    left = "" if is_first else f" {duration((record.num_steps - record.step) * record.step_seconds)} left"
    speed = f"{count(record.tokens_per_second)} tok/s"
    return f"{record.step}/{record.num_steps} loss {record.loss:.3f} {speed}{left}"
