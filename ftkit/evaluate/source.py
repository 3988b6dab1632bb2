"""What a user means by RUN or MODEL: an export, a checkpoint of a run, or a model in Hugging Face's layout."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.config.model import ModelSpec
from ftkit.config.paths import is_path
from ftkit.errors import NotFoundError
from ftkit.hub.access import download_weights
from ftkit.model_folder import CONFIG_FILE
from ftkit.planning.layout import RunLayout
from ftkit.planning.plan import RunPlan, read_plan
from ftkit.runs.checkpoints import find_best, read_selection
from ftkit.runs.find import find_run

if TYPE_CHECKING:
    from ftkit.config.data import DataSpec
    from ftkit.planning.layout import Workspace

ADAPTER_CONFIG = "adapter_config.json"
BEST = "best"
"""In place of a step."""
_HUB_CACHE = Path("~/.cache/huggingface")


@dataclass(frozen=True)
class ModelFolder:
    """A model or adapters in Hugging Face's layout.

    Attributes:
        label: as it is shown.
    """

    folder: Path
    label: str

    @property
    def is_adapter(self) -> bool:
        """Whether it holds adapters for another model."""
        return (self.folder / ADAPTER_CONFIG).is_file()


@dataclass(frozen=True)
class TrainedStep:
    """The model of a run after a step: that of a checkpoint; step 0 is the model before training."""

    layout: RunLayout
    plan: RunPlan
    step: int

    @property
    def label(self) -> str:
        """The run and the step, as they can be typed."""
        return f"{self.plan.id}@{self.step}"


ModelSource = ModelFolder | TrainedStep


@dataclass(frozen=True)
class Target:
    """A model to try, with the run that it is from, if it is from one.

    Attributes:
        before: the same model before training; None if nobody can tell.
    """

    source: ModelSource
    plan: RunPlan | None = None
    before: ModelSource | None = None

    @property
    def data(self) -> DataSpec | None:
        """What the run's recipe says of its data."""
        return self.plan.recipe.data if self.plan else None


def find_target(reference: str, workspace: Workspace) -> Target:
    """Return the model that `RUN`, `RUN@STEP`, `RUN@best`, a folder or a hub id means.

    A run means its export; where that is missing, its best checkpoint by `evaluation.best`, or its newest one.

    Raises:
        NotFoundError: there is no such run, checkpoint or model.
    """
    folder = Path(reference).expanduser()
    if folder.is_dir() and not (folder / "plan.json").is_file():
        return Target(_model_folder(folder.resolve(), reference))
    if is_path(reference) and not folder.is_dir():
        raise NotFoundError(f"there is no folder {folder}", fix="give the folder of a model or a run")
    name, _, step = reference.rpartition("@")
    has_step = bool(name) and (step.isdigit() or step == BEST)
    if "/" in reference and not folder.is_dir() and not has_step:
        return Target(fetch_model(reference))
    if folder.is_dir():
        layout = RunLayout(folder.resolve())
    else:
        layout = find_run(name if has_step else reference, workspace).layout
    plan = read_plan(layout)
    before = TrainedStep(layout, plan, 0)
    if has_step:
        source: ModelSource = _at_step(before, _best_step(layout, plan) if step == BEST else int(step))
    elif (layout.export / CONFIG_FILE).is_file() or (layout.export / ADAPTER_CONFIG).is_file():
        source = ModelFolder(layout.export, plan.id)
    else:
        best = read_selection(layout)
        source = _at_step(before, best.step if best else _newest_step(layout, plan))
    return Target(source, plan, before)


def fetch_model(name: str, revision: str | None = None) -> ModelFolder:
    """Return the folder of a model that a path or a hub id names; a hub model is downloaded once.

    Raises:
        NotFoundError: there is none.
    """
    if is_path(name) or Path(name).is_dir():
        return _model_folder(Path(name).expanduser(), name)
    folder = download_weights(ModelSpec(weights=name, revision=revision), os.environ, _HUB_CACHE)
    return ModelFolder(folder, name)


def _model_folder(folder: Path, label: str) -> ModelFolder:
    if not (folder / CONFIG_FILE).is_file() and not (folder / ADAPTER_CONFIG).is_file():
        raise NotFoundError(
            f"{folder} has neither {CONFIG_FILE} nor {ADAPTER_CONFIG}",
            meaning="it is not the folder of a model, or a copy was interrupted",
            fix="give the export of a run, or a model in Hugging Face's layout",
        )
    return ModelFolder(folder, label)


def _at_step(before: TrainedStep, step: int) -> TrainedStep:
    steps = [each for each, _ in before.layout.list_checkpoints()]
    if step and step not in steps:
        listed = ", ".join(map(str, steps)) or "none"
        raise NotFoundError(
            f"{before.plan.id} has no checkpoint after step {step}",
            meaning=f"its checkpoints: {listed}; older ones are deleted (training.keep_checkpoints)",
            fix="give one of these as RUN@STEP; RUN@0 is the model before training",
        )
    return TrainedStep(before.layout, before.plan, step)


def _best_step(layout: RunLayout, plan: RunPlan) -> int:
    best = find_best(layout)
    if best is None:
        raise NotFoundError(
            f"no checkpoint of {plan.id} was evaluated",
            meaning="validation came at other steps than checkpoints, or there is no validation split",
            fix=f"give a step: ftkit checkpoints {plan.id}; evaluation.best keeps the best checkpoint of the next run",
        )
    return best.step


def _newest_step(layout: RunLayout, plan: RunPlan) -> int:
    steps = [step for step, _ in layout.list_checkpoints()]
    if not steps:
        raise NotFoundError(
            f"{plan.id} has no export and no checkpoint yet",
            meaning="it did not train far enough, or it was moved without its export",
            fix=f"see 'ftkit status {plan.id}'; '{plan.id}@0' is the model before training",
        )
    return steps[-1]
