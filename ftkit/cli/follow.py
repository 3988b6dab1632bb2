"""Watch a run until it ends: its records are the truth, the scheduler says whether it goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit.cli.poll import looks
from ftkit.cli.terminal.follow_views import view_for
from ftkit.cli.terminal.report import show_end
from ftkit.runs.records import RecordTail
from ftkit.runs.states import Observation, RunState

if TYPE_CHECKING:
    from ftkit.cli.terminal.console import Terminal
    from ftkit.cli.terminal.follow_views import FollowView
    from ftkit.runs.submission import SubmittedRun


def follow(run: SubmittedRun, terminal: Terminal, tail: RecordTail | None = None) -> None:
    """Show a run until it ends, then what came of it.

    Args:
        run: the run.
        terminal: where to show it.
        tail: where to begin with its records; none: at the first.

    Raises:
        RunFailedError: it failed, or was cancelled.
        KeyboardInterrupt: the user has seen enough; the run goes on.
    """
    tail = tail or RecordTail(run.layout.metrics)
    view = view_for(terminal)
    try:
        seen = _show_until_the_end(run, tail, view)
    except KeyboardInterrupt:
        view.close()
        terminal.say(f"\n{run.id} goes on without you. To come back or end it:")
        terminal.say(f"  ftkit status {run.id} --follow\n  ftkit cancel {run.id}")
        raise
    finally:
        view.close()
    show_end(run, seen, terminal)


def _show_until_the_end(run: SubmittedRun, tail: RecordTail, view: FollowView) -> Observation:
    last = Observation(RunState.UNKNOWN, is_final=False)
    for seen in looks(run):
        if seen:
            view.state(seen)
            last = seen
        for record in tail.read_new():  # after the state: what was written before the end is read
            view.record(record)
    return last
