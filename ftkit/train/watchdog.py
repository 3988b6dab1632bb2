"""Detects a step that hangs, and ends the run with what each rank did. Imports torch only, for scripts of users."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from ftkit.files import write_json
from ftkit.process import kernel_state
from ftkit.runs.failure import record_rank_error
from ftkit.runs.slow_ranks import HangReport, describe_hang, read_hang_reports
from ftkit.train.private_apis.torch import dump_collectives, record_collectives, waiting_collective
from ftkit.train.world import CHECKPOINT_GROUP

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout
    from ftkit.train.loop import Phase

log = logging.getLogger(__name__)

_LIMIT_IN_MEDIANS = 10.0
_NUM_TIMED_STEPS = 64
_MIN_TIMED_STEPS = 5  # steps before there is a limit: the first ones compile
_GRACE_SECONDS = 15.0  # wait for the reports of the other ranks


class HangError(Exception):
    """A step takes far longer than the steps before it."""


_PAUSED = {"batch": "batches", "after": "checkpoint"}
"""Phases in which the main thread may wait for another thread, with the prefix of that thread's name."""
_STATES = {
    "": "ended",
    "T": "stopped (SIGSTOP)",
    "D": "waiting for a disk or another device",
    "R": "computing in native code, which holds Python's lock",
    "S": "blocked in native code, which holds Python's lock",
}
"""Meaning of the kernel's state (proc(5)) of a process that does not report."""


class Watchdog:
    """Watches the steps of this rank from a thread. A step ends where `end_step` is called.

    All ranks notice a hang, since they wait for each other. Each writes its Python stacks, torch's record of the last
    collectives, and a report; what differs in the reports is the cause. The processes then end, and the job script
    restarts them. Steps shorter than `floor_seconds` are no hang. Work between two steps, such as a checkpoint, is only
    reported if it takes longer than the limit. User scripts announce no phases, so all their work is between steps.

    `processes` are the hosts and ids of all ranks; 0 if unknown. `num_steps` returns how many steps have ended.
    """

    def __init__(
        self,
        layout: RunLayout,
        rank: int,
        processes: Sequence[tuple[str, int]],
        num_steps: Callable[[], int],
        floor_seconds: float,
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._processes = dict(enumerate(processes))
        self._num_steps = num_steps
        self._floor = floor_seconds
        self._phase = ""
        self._seconds: deque[float] = deque(maxlen=_NUM_TIMED_STEPS)
        self._now: tuple[int, float] | None = None  # the current step, and when it or what is after it began
        self._reported: tuple[int, float] | None = None
        self._ended = threading.Event()
        record_collectives()  # a script makes its process groups later

    def start(self) -> None:
        self._layout.hang_report(self._rank).unlink(missing_ok=True)  # of an earlier start
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        self._ended.set()

    def begin(self, phase: Phase) -> None:
        self._phase = phase
        if phase == "batch":
            self._now = self._num_steps() + 1, time.monotonic()

    def end_step(self) -> None:
        now = time.monotonic()
        if self._now is not None:
            self._seconds.append(now - self._now[1])
        self._phase, self._now = "after", (self._num_steps(), now)

    @property
    def limit_seconds(self) -> float | None:
        if len(self._seconds) < _MIN_TIMED_STEPS:
            return None
        return max(self._floor, _LIMIT_IN_MEDIANS * median(self._seconds))

    def _watch(self) -> None:
        while not self._ended.wait(min(5.0, self._floor / 4)):
            now, limit, is_after = self._now, self.limit_seconds, self._phase == "after"
            if self._reported not in (None, now):  # it went on
                self._layout.hang_report(self._rank).unlink(missing_ok=True)
                self._reported = None
            if now is None or limit is None or time.monotonic() - now[1] <= limit or now == self._reported:
                continue
            self._reported = now
            self._report(now)
            if is_after:
                log.warning("what is after step %d takes longer than %.0f s: %s", now[0], limit, self._describe())
            elif now == self._now:  # it did not end meanwhile
                self._end_run(now[0], limit)

    def _report(self, now: tuple[int, float]) -> None:
        rank, layout = self._rank, self._layout
        (group, number), phase = waiting_collective(CHECKPOINT_GROUP), self._phase
        place = find_place(_PAUSED.get(phase, ""))
        since = time.time() - (time.monotonic() - now[1])
        with suppress(OSError):
            report = HangReport(socket.gethostname(), now[0], phase, since, place, group, number)
            write_json(layout.hang_report(rank), report)
            with layout.stacks(rank).open("w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file)
            if collectives := dump_collectives():
                layout.collectives(rank).write_bytes(collectives)

    def _describe(self) -> str:
        """Return which ranks the others wait for, once all have reported or the grace period is over."""
        hosts = {rank: host for rank, (host, _) in self._processes.items()}
        deadline, reports = time.monotonic() + _GRACE_SECONDS, dict[int, HangReport]()
        while len(reports) < len(hosts) and time.monotonic() < deadline:
            time.sleep(0.5)
            reports = read_hang_reports(self._layout)
            if time.monotonic() > deadline - _GRACE_SECONDS / 2:
                self._report_neighbors(reports)
        return describe_hang(reports, hosts)

    def _report_neighbors(self, reports: Mapping[int, HangReport]) -> None:
        """Write reports for ranks of this node that can't, because their threads don't run."""
        own = reports.get(self._rank)
        for rank, (host, pid) in self._processes.items():
            if own and pid and rank not in reports and host == own.host:
                state = kernel_state(pid)
                told = replace(own, place="", collective="", number=0, state=_STATES.get(state, f"in state {state}"))
                with suppress(OSError):
                    write_json(self._layout.hang_report(rank), told)

    def _end_run(self, step: int, limit: float) -> None:
        rank, layout = self._rank, self._layout
        error = HangError(
            f"step {step} takes longer than {limit:.0f} s: {self._describe()}. "
            f"Stacks of all ranks: {layout.stacks(rank).parent}"
        )
        log.error("%s", error)
        os._exit(record_rank_error(error, layout.rank_error(rank), layout.disk_full, rank=rank))


def find_place(thread_name: str = "") -> str:
    """Return the innermost line that a thread executes outside torch and the standard library.

    Use the first thread whose name begins with `thread_name`, else the main thread; its innermost line if in libraries.
    """
    named = [each for each in threading.enumerate() if thread_name and each.name.startswith(thread_name)]
    main = threading.main_thread()
    for thread in (*named, main):
        innermost = frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 - documented
        while frame and any(part in frame.f_code.co_filename for part in _LIBRARIES):
            frame = frame.f_back
        if frame := frame or (innermost if thread is main else None):
            code = frame.f_code
            return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
    return "?"


_LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", sysconfig.get_path("stdlib") + os.sep, "<frozen", "<string>")
