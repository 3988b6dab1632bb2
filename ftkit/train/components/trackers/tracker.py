"""What a tracker is told of a run, and what it must be able to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ftkit.planning.plan import RunPlan
from ftkit.runs.records import StartRecord, StepRecord

if TYPE_CHECKING:
    from ftkit.runs.records import EvaluationRecord

Outcome = Literal["completed", "stopped", "failed"]

DEFAULT_PROJECT = "ftkit"

_NOT_MEASURED = {"time", "step", "num_steps"}


@dataclass(frozen=True)
class TrackerRun:
    """A run as trackers show it. Its id is theirs too, so a run that goes on does so under the same one."""

    plan: RunPlan
    start: StartRecord

    def config(self) -> dict[str, Any]:
        """Return what the run is made of: the recipe, where it runs and with which versions."""
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
    """A tracker that a run is open in. Its methods may raise whatever the tracker raises, and may take their time."""

    def log(self, scalars: dict[str, float], step: int) -> None:
        """Send numbers of a step."""

    def close(self, outcome: Outcome) -> None:
        """Send what is left and close the run."""


def scalars_of(record: StepRecord | EvaluationRecord) -> dict[str, float]:
    """Return the numbers of a record as trackers name them: train/loss, eval/perplexity and so on."""
    prefix = "train" if isinstance(record, StepRecord) else "eval"
    return {
        f"{prefix}/{name}": value
        for name, value in vars(record).items()
        if name not in _NOT_MEASURED and isinstance(value, int | float)
    }


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values under dotted keys, as overrides on the command line have them."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
