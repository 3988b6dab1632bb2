"""Send records to the trackers of a recipe, each from a separate thread, so that none can stop or slow training."""

from __future__ import annotations

import logging
import os
import re
import time
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from ftkit.config.recipe import check_access, check_packages
from ftkit.runs.records import EndRecord, EvaluationRecord, StartRecord, StepRecord
from ftkit.train.components.trackers.mlflow import MlflowTracker
from ftkit.train.components.trackers.tensorboard import TensorBoardTracker
from ftkit.train.components.trackers.tracker import TrackerRun, scalars_of
from ftkit.train.components.trackers.wandb import WandbTracker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ftkit.config.recipe import SinkName, TrackingSpec
    from ftkit.planning.plan import RunPlan
    from ftkit.runs.records import Record
    from ftkit.train.components.trackers.tracker import Outcome, Tracker
    from ftkit.train.world import World

log = logging.getLogger(__name__)

CLOSE_SECONDS = 60.0
"""Seconds that the end of a run waits for all of its trackers together."""

_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")

TRACKERS: dict[SinkName, Callable[[TrackerRun], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


@contextmanager
def open_trackers(plan: RunPlan, world: World) -> Iterator[Callable[[Record], None]]:
    """Yield a function that sends a record to the trackers; on ranks other than 0 it does nothing.

    Raises:
        PrerequisiteError: a tracker's package, key or address is missing.
    """
    check_trackers(plan.recipe.tracking)
    with _open_workers(plan, plan.recipe.tracking.sinks if world.is_first else ()) as send:
        yield send


def send_late(plan: RunPlan, records: Iterable[Record]) -> None:
    """Send late records of a run whose trainer has ended; the first must be a start record, the last an end record.

    Raises:
        PrerequisiteError: a tracker's package, key or address is missing.
    """
    check_trackers(plan.recipe.tracking)
    with _open_workers(plan, plan.recipe.tracking.sinks) as send:
        for record in records:
            send(record)


@contextmanager
def _open_workers(plan: RunPlan, names: Iterable[SinkName]) -> Iterator[Callable[[Record], None]]:
    workers = [TrackerWorker(name, plan, TRACKERS[name]) for name in names]

    def send(record: Record) -> None:
        for worker in workers:
            worker.put(record)

    try:
        yield send
    finally:
        for worker in workers:
            worker.end()
        deadline = time.monotonic() + CLOSE_SECONDS
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))


def check_trackers(tracking: TrackingSpec) -> None:
    """Check packages, keys and addresses of the trackers before the model is built, the same on each rank.

    Raises:
        PrerequisiteError: a tracker's package, key or address is missing.
    """
    check_packages(tracking)
    check_access(tracking, os.environ, sees_home=True)


class TrackerWorker:
    """The thread that talks to one tracker.

    The first error is logged as a warning. The next record tries again, and opens the tracker if it is not open.
    metrics.jsonl has the records that a tracker lost.
    """

    def __init__(self, name: str, plan: RunPlan, open_tracker: Callable[[TrackerRun], Tracker]) -> None:
        self._name = name
        self._plan = plan
        self._open = open_tracker
        self._has_warned = False
        self._tracker: Tracker | None = None
        self._run: TrackerRun | None = None
        self._outcome: Outcome = "failed"
        self._records: SimpleQueue[Record | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Queue a record."""
        self._records.put(record)

    def end(self) -> None:
        """Queue the end of the run."""
        self._records.put(None)

    def join(self, seconds: float) -> None:
        """Wait until the tracker has taken all records, at most `seconds`."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning("tracker %s did not accept all records in time: metrics.jsonl has them", self._name)

    def _work(self) -> None:
        while (record := self._records.get()) is not None:
            with self._warning_once():
                self._take(record)
        with self._warning_once():
            if self._tracker is not None:
                self._tracker.close(self._outcome)

    def _take(self, record: Record) -> None:
        if isinstance(record, StartRecord):
            self._run = TrackerRun(self._plan, record)
        elif isinstance(record, EndRecord):
            self._outcome = record.outcome
        if self._tracker is None and self._run is not None:
            self._tracker = self._open(self._run)
        if self._tracker is not None and isinstance(record, StepRecord | EvaluationRecord):
            self._tracker.log(scalars_of(record), record.step)

    @contextmanager
    def _warning_once(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - trackers may raise any exception, and training continues
            if not self._has_warned:
                what = _CREDENTIALS.sub("***", f"{type(error).__name__}: {error}")
                log.warning("tracker %s failed, training continues: %s", self._name, what)
            self._has_warned = True
