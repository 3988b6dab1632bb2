"""Follow a run until it ends: read its records often, poll its scheduler less often."""

from __future__ import annotations

import codecs
import io
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from ftkit.cli.page.charts import require_matplotlib
from ftkit.cli.page.run_report import read_report
from ftkit.cli.page.write import run_page, save_page
from ftkit.cli.terminal.curves import Points, Scale, draw_curve
from ftkit.cli.terminal.format import count, duration
from ftkit.cli.terminal.record_lines import record_line
from ftkit.cli.terminal.run_view import show_end
from ftkit.errors import FtkitError, RunFailedError, TrainingError, plural
from ftkit.files import copy_new, read_json_if_valid
from ftkit.launch.job_states import Overview, observe_all
from ftkit.launch.scheduler import scheduler_for
from ftkit.process import without_control
from ftkit.runs import records
from ftkit.runs.ends import excluded_nodes
from ftkit.runs.job import Job, RunState, SubmittedRun
from ftkit.runs.metrics_file import RecordTail
from ftkit.runs.script_checks import Verdict
from ftkit.runs.script_log import read_script_step

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ftkit.cli.terminal.console import Terminal
    from ftkit.planning.layout import RunLayout

_OUTPUT_BYTES = 2**14
_READ_SECONDS = 0.3
_LOST_SECONDS = 60
_SECONDS_BETWEEN_STEPS = 30
_CURVE_WIDTH, _CURVE_HEIGHT = 100, 6
_ROOM_FOR_CURVE = 16  # minimum terminal lines for drawing the curve


def follow(run: SubmittedRun, terminal: Terminal, tail: RecordTail | None = None) -> None:
    """Follow a run until it ends, then show its results. Raises TrainingError: `--prove` found something.

    `tail` reads its records, by default from the first one. A script's output is shown from now on; without `tail`,
    also its last lines.
    """
    view = LiveView(terminal) if terminal.is_live else PlainView(terminal)
    output = _ScriptOutput(run.layout, view, num_before=0 if tail else _OUTPUT_BYTES) if run.layout.is_script else None
    tail = tail or RecordTail(run.layout.metrics)
    try:
        seen = _show_until_the_end(run, tail, view, output)
    except KeyboardInterrupt:
        view.close()
        terminal.say(
            f"\n{run.id} continues; to follow it: ftkit status {run.id} --follow; to stop it: ftkit cancel {run.id}"
        )
        raise
    finally:
        view.close()
    # The job wrote no page if it failed, or its image lacks matplotlib.
    if not run.layout.report.exists() and os.environ.get("FTKIT_REPORT", "1") != "0":
        with suppress(FtkitError):  # a missing report does not fail the run
            require_matplotlib()
            save_page(run_page(read_report(run.layout, seen.state)), run.layout.report)
    show_end(run, seen, terminal)
    verdict = read_json_if_valid(run.layout.proof, Verdict)
    if verdict and verdict.findings:
        checks = ", ".join(dict.fromkeys(finding.check for finding in verdict.findings))
        raise TrainingError(
            f"{run.id}: --prove has {plural(len(verdict.findings), 'finding')}: {checks}",
            fix=f"what is wrong, and what to change, is in its log: ftkit logs {run.id}",
        )
    if verdict and verdict.not_checked and not verdict.passed:
        raise TrainingError(
            f"{run.id}: --prove could check nothing: {next(iter(verdict.not_checked.values()))}",
            fix=f"see its log: ftkit logs {run.id}",
        )


def _show_until_the_end(run: SubmittedRun, tail: RecordTail, view: PlainView, output: _ScriptOutput | None) -> Job:
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
        for record in tail.read_new():  # read after the state, so that no record before a final state is missed
            is_warning = isinstance(record, records.ShardingRecord) and record.warning
            if output is None or not (is_warning or isinstance(record, records.ScriptStepRecord)):
                view.record(record)  # else the output shows it, or the progress that is read from it
        if output:
            output.show_new()
    return last


def follow_sweep(runs: Sequence[SubmittedRun], terminal: Terminal) -> None:
    """Print each change of the runs' states until all have ended; RunFailedError if one did not complete."""
    states: dict[str, Job] = {}
    for overview in _poll(runs):
        for run_id, seen in overview.states.items() if overview else ():
            if str(seen) != str(states.get(run_id)):
                terminal.say(f"{run_id}: {seen}")
            states[run_id] = seen
    if others := [run_id for run_id, seen in states.items() if seen.state is not RunState.COMPLETED]:
        what = f"{len(others)} of {len(runs)} runs did not complete"
        raise RunFailedError(what, fix=f"see why: ftkit status {others[0]}")


def poll_states(run: SubmittedRun) -> Iterator[Job | None]:
    """Yield the state after each poll of the scheduler, and None in between, when it is time to read the records.

    Ends after a final state.
    """
    for overview in _poll([run]):
        yield overview.states[run.id] if overview else None


def _poll(runs: Sequence[SubmittedRun]) -> Iterator[Overview | None]:
    """Yield the result of each poll of all runs, and None in between; end after their final states."""
    pause = max(scheduler_for(run.submission.scheduler).poll_seconds for run in runs)
    last_known = time.monotonic()
    while True:
        overview = observe_all(runs)
        yield overview
        left = {run_id: seen for run_id, seen in overview.states.items() if not seen.is_final}
        if not left:
            return
        polled = time.monotonic()
        if overview.warnings or any(seen.state is not RunState.UNKNOWN for seen in left.values()):
            last_known = polled
        elif polled - last_known > _LOST_SECONDS:
            run_id, seen = next(iter(left.items()))
            raise RunFailedError(f"lost track of {run_id}: {seen.reason}", fix=f"read its log: ftkit logs {run_id}")
        while time.monotonic() < polled + pause:
            time.sleep(_READ_SECONDS)
            yield None


class _ScriptOutput:
    """The output of a script in a run's log: its lines, after carriage returns are applied, and its progress."""

    def __init__(self, layout: RunLayout, view: PlainView, num_before: int) -> None:
        size = layout.job_log.stat().st_size if layout.job_log.is_file() else 0
        self._layout = layout
        self._view = view
        self._offset = max(0, size - num_before)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = ""

    def show_new(self) -> None:
        new = io.BytesIO()
        self._offset = copy_new(self._layout.job_log, self._offset, new)
        *lines, rest = (self._line + self._decoder.decode(new.getvalue())).split("\n")
        for line in lines:
            drawn = [part for part in without_control(line).split("\r") if part.strip()]
            self._view.note(drawn[-1].rstrip() if drawn else "")
        self._line = "\r".join(rest.rsplit("\r", 2)[-2:])[-_OUTPUT_BYTES:]
        if new.tell() and (step := read_script_step(self._layout)):
            self._view.record(step)


class PlainView:
    """Few lines, suited to the log of a CI job; memory records are only in the run's log."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._shown = ""
        self._next_step = 0.0

    def state(self, seen: Job) -> None:
        """Show the run's state if it changed; the summary shows that a run is completed."""
        words = str(seen)
        if words != self._shown and seen.state is not RunState.COMPLETED:
            self._terminal.say(words)
            self._shown = words

    def note(self, text: str) -> None:
        self._terminal.say(text)

    def record(self, record: records.Record) -> None:
        """Show a record of the trainer; for steps, only the first, the last, and one every half minute of the run."""
        if isinstance(record, records.MemoryRecord | records.ScriptStepRecord):
            return
        if isinstance(record, records.StepRecord):
            if record.time < self._next_step and record.step != record.num_steps:
                return
            self._next_step = record.time + _SECONDS_BETWEEN_STEPS
        self._terminal.say(record_line(record))

    def close(self) -> None: ...


class _CurveAndBar(Progress):
    points: Points = ()

    def get_renderables(self) -> Iterator[RenderableType]:
        if self.points and self.console.height >= _ROOM_FOR_CURVE:
            yield Text(self.draw(), no_wrap=True)
        yield self.make_tasks_table(self.tasks)

    def draw(self) -> str:
        scale = Scale.of([self.points])
        return draw_curve(self.points, scale, min(self.console.width - 1, _CURVE_WIDTH), _CURVE_HEIGHT) if scale else ""


class LiveView(PlainView):
    """A loss curve and a progress bar for the steps; a line above them for every other record."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        self._progress = _CurveAndBar(
            SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}", markup=False), console=terminal.talk, expand=True, transient=True,
            refresh_per_second=4,
        )  # fmt: skip
        self._task = self._progress.add_task("submitted", total=None, numbers="")
        self._is_waiting = True
        self._stage: records.StageRecord | None = None
        self._is_first_step = False
        self._progress.start()

    def state(self, seen: Job) -> None:
        """Show the state until the run starts; after that, its records show more."""
        is_running = seen.state is RunState.RUNNING
        if self._is_waiting or not is_running:
            self._show_waiting("running" if is_running else str(seen))
        self._is_waiting = not is_running

    def note(self, text: str) -> None:
        self._progress.console.print(text)

    def record(self, record: records.Record) -> None:
        """Advance the bar, or print a line above it; a stage moves above it when the next stage starts."""
        if isinstance(record, records.MemoryRecord):
            return
        if self._stage:
            seconds = record.time - self._stage.time
            self.note(f"{self._stage.stage} ({duration(seconds)})" if seconds >= 1 else self._stage.stage)
            self._stage = None
        match record:
            case records.ScriptStepRecord(num_steps=None):
                self._show_waiting(record_line(record))
            case records.ScriptStepRecord(step=step, num_steps=num_steps):
                loss = "" if record.loss is None else f" loss {record.loss:.3f}"
                left = "" if record.seconds_left is None else f" {duration(record.seconds_left)} left"
                self._move_bar(step, num_steps or step, record.loss, f"{step}/{num_steps}{loss}{left}")
            case records.StageRecord():
                self._stage = record
                self._show_waiting(record.stage)
            case records.StepRecord():
                seconds = (record.num_steps - record.step) * record.step_seconds
                # Unknown from the first record of a start, which includes compiling.
                left = "" if self._is_first_step else f" {duration(seconds)} left"
                speed = f"{count(record.tokens_per_second)} tok/s in total"
                numbers = f"{record.step}/{record.num_steps} loss {record.loss:.3f} {speed}{left}"
                self._move_bar(record.step, record.num_steps, record.loss, numbers)
                self._is_first_step = False
            case _:
                self._is_first_step |= isinstance(record, records.StartRecord)
                self.note(record_line(record))
                if isinstance(record, records.EndRecord):
                    self._show_waiting(record.outcome)

    def _move_bar(self, step: int, num_steps: int, loss: float | None, numbers: str) -> None:
        if loss is not None:
            before = [point for point in self._progress.points if point[0] < step]  # a restart repeats steps
            self._progress.points = [*before, (step, loss)]
        self._progress.update(self._task, description="training", total=num_steps, completed=step, numbers=numbers)

    def _show_waiting(self, description: str) -> None:
        """Pulse the bar while there are no steps to count."""
        self._progress.tasks[0].total = None
        self._progress.update(self._task, description=description, completed=0, numbers="")

    def close(self) -> None:
        """Keep the curve on the screen and remove the bar."""
        self._progress.stop()
        if curve := self._progress.draw():
            self.note(curve)
            self._progress.points = ()
