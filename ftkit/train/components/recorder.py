"""Write records to metrics.jsonl, and send them to TensorBoard, Weights & Biases and MLflow.

Each tracker has its own thread, so that none can stop or slow down training; metrics.jsonl stays authoritative.
"""

from __future__ import annotations

import json
import logging
import os
import re
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Literal, Protocol

from ftkit.config.recipe import SinkName, check_access, check_packages
from ftkit.errors import one_line, redact
from ftkit.runs.manifest import flat
from ftkit.runs.metrics_file import RecordTail, append_record, read_job_evaluations
from ftkit.runs.records import EndRecord, EvaluationRecord, Record, StartRecord, StepRecord

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout
    from ftkit.planning.plan import RunPlan
    from ftkit.train.world import World

log = logging.getLogger(__name__)

Outcome = Literal["completed", "stopped", "failed"]
CLOSE_SECONDS = 60.0  # total timeout for all trackers at the end of a run
_DEFAULT_PROJECT = "ftkit"
_REJECTED = re.compile(r"^[./]+|[^\w.-]+")  # by MLflow in a name, or would make a path
_MLFLOW_STATUSES = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_NOT_MEASURED = {"time", "step", "num_steps"}


class Recorder:
    """Append records to metrics.jsonl on rank 0, and send them to trackers; keep records while writing fails.

    Records of jobs that evaluate checkpoints are copied here, so that metrics.jsonl and the trackers have one writer.
    """

    def __init__(self, layout: RunLayout, world: World, send: Callable[[Record], None]) -> None:
        self._path = layout.metrics if world.is_first else None
        self._send = send
        self._waiting: deque[Record] = deque()
        self._has_failed = False
        self._evaluations = RecordTail(layout.evaluations, skips_old=True)
        self._unread_evaluations = read_job_evaluations(layout.metrics, layout.evaluations) if world.is_first else []

    def write(self, record: Record) -> None:
        """Append a record and send it. Raises OSError only if the run's last record can't be written."""
        if self._path is None:
            return
        evaluations: list[Record] = []
        if isinstance(record, StartRecord | StepRecord | EndRecord):  # trackers are open
            evaluations = [*self._unread_evaluations, *self._evaluations.read_new()]
            self._unread_evaluations = []
        # Nothing follows the end.
        for each in [*evaluations, record] if isinstance(record, EndRecord) else [record, *evaluations]:
            self._append(each, self._path)

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


class Tracker(Protocol):
    """A tracker with an open run, under the run's id. Its methods may raise any exception, and may take long."""

    def log(self, scalars: dict[str, float], step: int) -> None:
        """Send the scalars of a step."""

    def close(self, outcome: Outcome) -> None:
        """Send pending records and close the run."""


def _configuration(plan: RunPlan, start: StartRecord) -> dict[str, object]:
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


class TensorBoardTracker:
    """Event files in the run's folder; each resume begins another file."""

    def __init__(self, plan: RunPlan, start: StartRecord) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra

        # Steps after the last checkpoint are repeated: viewers drop the earlier ones.
        purge_step = start.resumed_from + 1 if start.resumed_from else 0
        self._writer = SummaryWriter(str(plan.layout.tensorboard), purge_step=purge_step)
        # Markdown shows indented text verbatim.
        text = textwrap.indent(json.dumps(_configuration(plan, start), indent=2) + "\n", "    ")
        self._writer.add_text("config", text, start.resumed_from)

    def log(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self, outcome: Outcome) -> None:  # noqa: ARG002 - TensorBoard has no outcome
        self._writer.close()


class WandbTracker:
    """A run of W&B, online or offline (WANDB_MODE), whose local files are in the run's folder."""

    def __init__(self, plan: RunPlan, start: StartRecord) -> None:
        import wandb  # noqa: PLC0415 - an extra

        self._teardown = wandb.teardown
        self._run = wandb.init(
            project=plan.recipe.tracking.project or os.environ.get("WANDB_PROJECT") or _DEFAULT_PROJECT,
            id=plan.id,
            name=plan.id,
            resume="allow",
            dir=str(plan.layout.root),
            config=_configuration(plan, start),
            settings=wandb.Settings(console="off"),  # the job's log is ftkit's, and stays in the run's folder
        )
        self._run.define_metric("job_eval/*", step_metric="job_eval/step")

    def log(self, scalars: dict[str, float], step: int) -> None:
        # W&B drops steps before its newest one. Evaluations by other jobs arrive late, so they have their own axis.
        if any(name.startswith("job_eval/") for name in scalars):
            scalars, step = scalars | {"job_eval/step": step}, max(step, self._run.step)
        self._run.log(scalars, step=step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=1 if outcome == "failed" else 0)
        self._teardown()  # W&B's process flushes when it ends, and the trainer skips exit handlers


class MlflowTracker:
    """A run in an experiment of MLflow. MLflow chooses its id; a tag has ftkit's."""

    _TAG = "ftkit.run"
    _PARAMETERS_PER_REQUEST = 100
    _MAX_PARAMETER_LENGTH = 500  # characters that every server accepts, even older ones

    def __init__(self, plan: RunPlan, start: StartRecord) -> None:
        import mlflow  # noqa: PLC0415 - an extra

        tracking = plan.recipe.tracking
        name = tracking.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or _DEFAULT_PROJECT
        self._entities = mlflow.entities
        self._client = client = mlflow.MlflowClient(tracking_uri=tracking.mlflow_uri)
        experiment = client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
        if known := client.search_runs([experiment_id], f"tags.`{self._TAG}` = '{plan.id}'"):
            self._run_id = str(known[0].info.run_id)
            client.update_run(self._run_id, status="RUNNING")
            return
        created = client.create_run(experiment_id, tags={self._TAG: plan.id}, run_name=plan.id)
        self._run_id = str(created.info.run_id)
        parameters = [
            mlflow.entities.Param(key, str(value)[: self._MAX_PARAMETER_LENGTH])
            for key, value in flat(_configuration(plan, start))
        ]
        for first in range(0, len(parameters), self._PARAMETERS_PER_REQUEST):
            client.log_batch(self._run_id, params=parameters[first : first + self._PARAMETERS_PER_REQUEST])

    def log(self, scalars: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(key, value, now, step) for key, value in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, outcome: Outcome) -> None:
        self._client.set_terminated(self._run_id, _MLFLOW_STATUSES[outcome])


TRACKERS: dict[SinkName, Callable[[RunPlan, StartRecord], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


@contextmanager
def open_trackers(plan: RunPlan, world: World | None = None) -> Iterator[Callable[[Record], None]]:
    """Yield a function that sends records to the trackers on rank 0: first a start record, last an end record."""
    tracking = plan.recipe.tracking
    check_packages(tracking)
    check_access(tracking, os.environ, sees_home=True)
    queues: dict[SinkName, SimpleQueue[Record | None]] = {}
    if world is None or world.is_first:
        queues = {name: SimpleQueue() for name in tracking.sinks}
    threads = [
        Thread(target=_talk_to, args=(name, plan, queue), name=name, daemon=True) for name, queue in queues.items()
    ]
    for thread in threads:
        thread.start()

    def send(record: Record | None) -> None:
        for queue in queues.values():
            queue.put(record)

    try:
        yield send
    finally:
        send(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                log.warning("tracker %s did not accept all records in time: metrics.jsonl has them", thread.name)


def _talk_to(name: SinkName, plan: RunPlan, records: SimpleQueue[Record | None]) -> None:
    """Send records to one tracker until one is None; try again with each record after an error."""
    tracker: Tracker | None = None
    start: StartRecord | None = None
    outcome: Outcome = "failed"
    is_over = has_warned = False
    while not is_over:
        record = records.get()
        is_over = record is None
        try:
            if isinstance(record, StartRecord):
                start = record
            elif isinstance(record, EndRecord):
                outcome = record.outcome
            if tracker is None and start is not None and not is_over:
                tracker = TRACKERS[name](plan, start)
            if tracker is not None and isinstance(record, StepRecord | EvaluationRecord):
                tracker.log(scalars_of(record), record.step)
            elif tracker is not None and is_over:
                tracker.close(outcome)
        except Exception as error:  # noqa: BLE001 - trackers may raise any exception, and training continues
            if not has_warned:
                what = redact(f"{type(error).__name__}: {error}", os.environ)
                log.warning("tracker %s failed, training continues: %s", name, what)
            has_warned = True


def scalars_of(record: StepRecord | EvaluationRecord) -> dict[str, float]:
    """Return the numbers of a record by their names in trackers: train/loss, train/loss/SOURCE and so on."""
    scalars: dict[str, float] = {}
    if isinstance(record, StepRecord):
        prefix = "train"
        scalars |= {f"{prefix}/routers/{name}": value for name, value in _numbers(record.routers)}
    else:
        # Evaluations by a separate job arrive late, and use other rows of the validation split.
        prefix = "job_eval" if record.when == "job" else "eval"
    scalars |= {f"{prefix}/{name}": score for name, score in record.scores.items()}
    for source, measured in record.sources.items():
        scalars[f"{prefix}/loss/{_REJECTED.sub('_', source)}"] = measured.loss
    return scalars | {f"{prefix}/{name}": value for name, value in _numbers(record) if name not in _NOT_MEASURED}


def _numbers(record: object) -> list[tuple[str, float]]:
    return [(name, value) for name, value in getattr(record, "__dict__", {}).items() if isinstance(value, int | float)]
