"""Follow a run until it ends: read its records often, poll its scheduler less often."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ftkit.cli.report import write_report_at_end
from ftkit.cli.terminal.report import show_end
from ftkit.errors import FtkitError, RunFailedError
from ftkit.runs.job import Job, RunState
from ftkit.runs.metrics_file import RecordTail
from ftkit.runs.progress import excluded_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.cli.terminal.console import Terminal
    from ftkit.cli.terminal.follow_views import FollowView
    from ftkit.runs.job import SubmittedRun

_READ_SECONDS = 0.3
_LOST_SECONDS = 60


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
    from ftkit.cli.terminal.follow_views import view_for

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
