"""Write records to metrics.jsonl, and send them to TensorBoard, Weights & Biases and MLflow.

Each tracker has a thread of its own, so that none can stop or slow training; metrics.jsonl stays authoritative.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ftkit.config.recipe import check_access, check_packages
from ftkit.errors import one_line
from ftkit.planning.plan import RunPlan
from ftkit.runs.metrics_file import RecordTail, append_record, read_job_evaluations
from ftkit.runs.records import EndRecord, EvaluationRecord, StartRecord, StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ftkit.config.recipe import SinkName, TrackingSpec
    from ftkit.planning.layout import RunLayout
    from ftkit.runs.records import Record
    from ftkit.train.world import World

log = logging.getLogger(__name__)

Outcome = Literal["completed", "stopped", "failed"]
CLOSE_SECONDS = 60.0
"""Seconds that the end of a run waits for all of its trackers together."""
_DEFAULT_PROJECT = "ftkit"
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_REJECTED = re.compile(r"^[./]+|[^\w.-]+")
"""Characters that MLflow rejects in a name, and those that would make a path."""
_MLFLOW_STATUSES = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_NOT_MEASURED = {"time", "step", "num_steps"}


class Recorder:
    """Appends records to metrics.jsonl on rank 0, and sends them to the trackers; other ranks write nothing.

    While the file can't be written (disk full, file system unreachable), records are kept, and written with the next.

    Jobs that evaluate checkpoints write a separate file (`RunLayout.evaluations`). Its records are copied here, so that
    metrics.jsonl and the trackers have one writer.
    """

    def __init__(self, layout: RunLayout, world: World, send: Callable[[Record], None]) -> None:
        self._path = layout.metrics if world.is_first else None
        self._send = send
        self._waiting: deque[Record] = deque()
        self._has_failed = False
        self._evaluations = RecordTail(layout.evaluations, skips_old=True)
        self._unread_evaluations = read_job_evaluations(layout.metrics, layout.evaluations) if world.is_first else []

    def write(self, record: Record) -> None:
        """Append a record, and send it.

        Raises:
            OSError: it is the run's last record, and can't be written.
        """
        if self._path is None:
            return
        if isinstance(record, EndRecord):  # nothing follows it
            self._copy_evaluations(self._path)
        self._append(record, self._path)
        if isinstance(record, StartRecord | StepRecord):  # trackers are open
            self._copy_evaluations(self._path)

    def _copy_evaluations(self, path: Path) -> None:
        """Copy new evaluations of other jobs."""
        for evaluation in (*self._unread_evaluations, *self._evaluations.read_new()):
            self._append(evaluation, path)
        self._unread_evaluations = []

    def _append(self, record: Record, path: Path) -> None:
        self._waiting.append(record)
        try:
            while self._waiting:
                append_record(path, self._waiting[0], begins_line=self._has_failed)
                self._has_failed = False
                self._waiting.popleft()
        except OSError as error:
            if isinstance(record, EndRecord):
                raise
            if not self._has_failed:
                log.error("%s can't be written: %s; its records are kept in memory", path, one_line(error))  # noqa: TRY400
            self._has_failed = True
        self._send(record)


# --- Trackers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrackerRun:
    """A run as trackers show it. It has the same id there, so a resumed run continues its record."""

    plan: RunPlan
    start: StartRecord

    def config(self) -> dict[str, object]:
        """Return the configuration: recipe, cluster, image, engine, device and versions."""
        plan, start = self.plan, self.start
        return {
            "run": plan.id,
            "recipe": plan.recipe.model_dump(mode="json", exclude_none=True),
            "cluster": plan.cluster.name,
            "image": plan.image or "none",
            "engine": start.engine,
            "device": start.device,
            "world_size": start.world_size,
            "num_parameters": start.num_parameters,
            "versions": {"ftkit": plan.ftkit_version, **start.versions},
        }


class Tracker(Protocol):
    """A tracker in which a run is open. Its methods may raise any exception, and may take long."""

    def log(self, scalars: dict[str, float], step: int) -> None:
        """Send the scalars of a step."""

    def close(self, outcome: Outcome) -> None:
        """Send pending records and close the run."""


class TensorBoardTracker:
    """Event files in the run's folder; each time the run is resumed, it begins another one."""

    def __init__(self, run: TrackerRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra

        resumed_from = run.start.resumed_from
        # Steps after the last checkpoint are repeated: viewers drop the earlier ones.
        self._writer = SummaryWriter(
            str(run.plan.layout.tensorboard), purge_step=resumed_from + 1 if resumed_from else 0
        )
        # Markdown shows indented text verbatim.
        text = "".join(f"    {line}\n" for line in json.dumps(run.config(), indent=2).splitlines())
        self._writer.add_text("config", text, resumed_from)

    def log(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self, outcome: Outcome) -> None:  # noqa: ARG002 - TensorBoard has no outcome
        self._writer.close()


class WandbTracker:
    """A run of W&B, online or offline (WANDB_MODE), whose local files are in the run's folder."""

    def __init__(self, run: TrackerRun) -> None:
        import wandb  # noqa: PLC0415 - an extra

        plan = run.plan
        self._teardown = wandb.teardown
        self._run = wandb.init(
            project=plan.recipe.tracking.project or os.environ.get("WANDB_PROJECT") or _DEFAULT_PROJECT,
            id=plan.id,
            name=plan.id,
            resume="allow",
            dir=str(plan.layout.root),
            config=run.config(),
            settings=wandb.Settings(console="off"),  # the job's log is ftkit's, and stays in the run's folder
        )
        self._run.define_metric("job_eval/*", step_metric="job_eval/step")

    def log(self, scalars: dict[str, float], step: int) -> None:
        # W&B drops steps before its newest one; evaluations by other jobs arrive late, so they have an own axis.
        if any(name.startswith("job_eval/") for name in scalars):
            scalars, step = scalars | {"job_eval/step": step}, max(step, self._run.step)
        self._run.log(scalars, step=step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=1 if outcome == "failed" else 0)
        self._teardown()  # W&B's process flushes when it ends; the trainer exits without exit handlers


class MlflowTracker:
    """A run in an experiment of MLflow. MLflow chooses its id; a tag has ftkit's."""

    _TAG = "ftkit.run"
    _PARAMETERS_PER_REQUEST = 100
    _MAX_PARAMETER_LENGTH = 500
    """Characters that every server accepts, even older ones."""

    def __init__(self, run: TrackerRun) -> None:
        from mlflow import MlflowClient  # noqa: PLC0415 - an extra

        tracking = run.plan.recipe.tracking
        name = tracking.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or _DEFAULT_PROJECT
        self._client = MlflowClient(tracking_uri=tracking.mlflow_uri)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        known = self._client.search_runs([experiment_id], f"tags.`{self._TAG}` = '{run.plan.id}'")
        self._run_id: str = known[0].info.run_id if known else self._begin(run, experiment_id)
        self._client.update_run(self._run_id, status="RUNNING")

    def _begin(self, run: TrackerRun, experiment_id: str) -> str:
        from mlflow.entities import Param  # noqa: PLC0415

        run_id = str(
            self._client.create_run(experiment_id, tags={self._TAG: run.plan.id}, run_name=run.plan.id).info.run_id
        )
        parameters = [
            Param(key, str(value)[: self._MAX_PARAMETER_LENGTH]) for key, value in _flat(run.config()).items()
        ]
        for first in range(0, len(parameters), self._PARAMETERS_PER_REQUEST):
            self._client.log_batch(run_id, params=parameters[first : first + self._PARAMETERS_PER_REQUEST])
        return run_id

    def log(self, scalars: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric  # noqa: PLC0415

        now = int(time.time() * 1000)
        self._client.log_batch(self._run_id, metrics=[Metric(key, value, now, step) for key, value in scalars.items()])

    def close(self, outcome: Outcome) -> None:
        self._client.set_terminated(self._run_id, _MLFLOW_STATUSES[outcome])


TRACKERS: dict[SinkName, Callable[[TrackerRun], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


@contextmanager
def open_trackers(plan: RunPlan, world: World | None = None) -> Iterator[Callable[[Record], None]]:
    """Yield a function that sends a record to the trackers: first a start record, last an end record.

    On ranks other than 0 it does nothing.

    Raises:
        PrerequisiteError: a tracker's package, key or address is missing.
    """
    check_trackers(plan.recipe.tracking)
    names = plan.recipe.tracking.sinks if world is None or world.is_first else ()
    workers = [_Worker(name, plan, TRACKERS[name]) for name in names]

    def send(record: Record) -> None:
        for worker in workers:
            worker.records.put(record)

    try:
        yield send
    finally:
        for worker in workers:
            worker.records.put(None)
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


class _Worker:
    """The thread that talks to one tracker; None in `records` ends it.

    The first error is logged as a warning. The next record tries again, and opens the tracker if it is not open.
    metrics.jsonl has the records that a tracker lost.
    """

    def __init__(self, name: str, plan: RunPlan, open_tracker: Callable[[TrackerRun], Tracker]) -> None:
        self.records: SimpleQueue[Record | None] = SimpleQueue()
        self._name = name
        self._plan = plan
        self._open = open_tracker
        self._has_warned = False
        self._tracker: Tracker | None = None
        self._run: TrackerRun | None = None
        self._outcome: Outcome = "failed"
        self._thread = Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait until the tracker has taken all records, at most `seconds`."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning("tracker %s did not accept all records in time: metrics.jsonl has them", self._name)

    def _work(self) -> None:
        while (record := self.records.get()) is not None:
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


def scalars_of(record: StepRecord | EvaluationRecord) -> dict[str, float]:
    """Return the numbers of a record by their names in trackers: train/loss, train/loss/SOURCE and so on."""
    scalars: dict[str, float] = {}
    if isinstance(record, StepRecord):
        prefix = "train"
        scalars |= {f"{prefix}/routers/{name}": value for name, value in _numbers(record.routers)}
    else:
        # Evaluations by a separate job arrive late, and use other rows of the validation split.
        prefix = "job_eval" if record.when == "job" else "eval"
        # The record has SQL's score as a field too.
        scalars |= {f"{prefix}/{name}": score for name, score in record.scores.items() if name != "sql"}
    for source, measured in record.sources.items():
        scalars[f"{prefix}/loss/{_REJECTED.sub('_', source)}"] = measured.loss
    return scalars | {f"{prefix}/{name}": value for name, value in _numbers(record) if name not in _NOT_MEASURED}


def _numbers(record: object) -> list[tuple[str, float]]:
    """Return the fields of a record that are numbers; none of None."""
    return [(name, value) for name, value in getattr(record, "__dict__", {}).items() if isinstance(value, int | float)]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, object]:
    """Flatten nested values into dotted keys, as overrides on the command line."""
    found: dict[str, object] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
