"""MLflow, with a tracking server or any other store of its client."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from ftkit.train.components.trackers.tracker import DEFAULT_PROJECT, flat

if TYPE_CHECKING:
    from ftkit.train.components.trackers.tracker import Outcome, TrackerRun

_RUN_TAG = "ftkit.run"
_STATUSES = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_PARAMETERS_PER_REQUEST = 100
_MAX_PARAMETER_LENGTH = 500
"""Characters that every server accepts, even older ones."""


class MlflowTracker:
    """A run in an experiment of MLflow. MLflow chooses its id; a tag has ftkit's."""

    def __init__(self, run: TrackerRun) -> None:
        from mlflow import MlflowClient  # noqa: PLC0415 - an extra

        tracking = run.plan.recipe.tracking
        name = tracking.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT
        self._client = MlflowClient(tracking_uri=tracking.mlflow_uri)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        known = self._client.search_runs([experiment_id], f"tags.`{_RUN_TAG}` = '{run.plan.id}'")
        self._run_id: str = known[0].info.run_id if known else self._begin(run, experiment_id)
        self._client.update_run(self._run_id, status="RUNNING")

    def _begin(self, run: TrackerRun, experiment_id: str) -> str:
        from mlflow.entities import Param  # noqa: PLC0415

        begun: Any = self._client.create_run(experiment_id, tags={_RUN_TAG: run.plan.id}, run_name=run.plan.id)
        parameters = [Param(key, str(value)[:_MAX_PARAMETER_LENGTH]) for key, value in flat(run.config()).items()]
        for first in range(0, len(parameters), _PARAMETERS_PER_REQUEST):
            self._client.log_batch(begun.info.run_id, params=parameters[first : first + _PARAMETERS_PER_REQUEST])
        return str(begun.info.run_id)

    def log(self, scalars: dict[str, float], step: int) -> None:
        """Send the scalars of a step in one request."""
        from mlflow.entities import Metric  # noqa: PLC0415

        now = int(time.time() * 1000)
        self._client.log_batch(self._run_id, metrics=[Metric(key, value, now, step) for key, value in scalars.items()])

    def close(self, outcome: Outcome) -> None:
        """Set the status of the run."""
        self._client.set_terminated(self._run_id, _STATUSES[outcome])
