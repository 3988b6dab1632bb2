"""The interface of a tracker, and the run as trackers show it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ftkit.planning.plan import RunPlan
from ftkit.runs.records import StartRecord, StepRecord

if TYPE_CHECKING:
    from ftkit.runs.records import EvaluationRecord

Outcome = Literal["completed", "stopped", "failed"]

DEFAULT_PROJECT = "ftkit"

_REJECTED = re.compile(r"^[./]+|[^\w.-]+")
"""Characters that MLflow rejects in a name, and those that would make a path."""

_NOT_MEASURED = {"time", "step", "num_steps"}


@dataclass(frozen=True)
class TrackerRun:
    """A run as trackers show it. It has the same id there, so a resumed run continues its record."""

    plan: RunPlan
    start: StartRecord

    def config(self) -> dict[str, Any]:
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


def scalars_of(record: StepRecord | EvaluationRecord) -> dict[str, float]:
    """Return the numbers of a record by their names in trackers: train/loss, train/loss/SOURCE and so on."""
    prefix, scores, of_routers = "train", {}, {}
    if isinstance(record, StepRecord):
        of_routers = {f"{prefix}/routers/{name}": value for name, value in _numbers(record.routers)}
    else:
        # Evaluations by a separate job arrive late, and use other rows of the validation split.
        prefix = "job_eval" if record.when == "job" else "eval"
        # The record has SQL's score as a field too.
        scores = {f"{prefix}/{name}": score for name, score in record.scores.items() if name != "sql"}
    by_source = {
        f"{prefix}/loss/{_REJECTED.sub('_', source)}": measured.loss for source, measured in record.sources.items()
    }
    return (
        by_source
        | scores
        | of_routers
        | {f"{prefix}/{name}": value for name, value in _numbers(record) if name not in _NOT_MEASURED}
    )


def _numbers(record: object) -> list[tuple[str, float]]:
    """Return the fields of a record that are numbers; none of None."""
    return [(name, value) for name, value in getattr(record, "__dict__", {}).items() if isinstance(value, int | float)]


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested values into dotted keys, as overrides on the command line."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
