"""Resolve RUN or MODEL: an export, a checkpoint of a run, or a model in Hugging Face's layout."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.errors import NotFoundError
from ftkit.files import read_json_if_valid
from ftkit.hub.readiness import download_weights
from ftkit.models.architecture import ModelSpec
from ftkit.models.folder import ADAPTER_CONFIG, EXPORT_RECORD
from ftkit.models.weight_files import CONFIG_FILE
from ftkit.paths import is_path
from ftkit.planning.layout import RunLayout, Workspace
from ftkit.planning.plan import RunPlan, read_plan_to_use
from ftkit.runs.checkpoints import MARKER, SavedFile, choose_step
from ftkit.runs.compare import find_run_step

if TYPE_CHECKING:
    from ftkit.config.data import DataSpec

_HUB_CACHE = Path("~/.cache/huggingface")


@dataclass(frozen=True)
class ModelFolder:
    """A model or adapters in Hugging Face's layout, with its name in output."""

    folder: Path
    label: str
    hub_home: Path = _HUB_CACHE  # the cache for the base model of adapters, unless HF_HOME is set
    is_base: bool = False  # without the adapters, but with their tokenizer

    @property
    def is_adapter(self) -> bool:
        return (self.folder / ADAPTER_CONFIG).is_file()


@dataclass(frozen=True)
class TrainedStep:
    """The model of a run after a step, from a checkpoint; step 0 is the model before training."""

    layout: RunLayout
    plan: RunPlan
    step: int

    @property
    def label(self) -> str:
        """The run and the step, as typed in commands."""
        return f"{self.plan.id}@{self.step}"


ModelSource = ModelFolder | TrainedStep


def weights_digests(source: ModelSource) -> dict[str, str]:
    """Return the SHA-256 of each weight file, as on the hub; for a checkpoint, the SHA-256 of its marker."""
    folder = source.folder if isinstance(source, ModelFolder) else source.layout.checkpoint(source.step)
    files = sorted(path for path in folder.glob("*") if path.suffix == ".safetensors" or path.name == MARKER)
    return {path.name: SavedFile.of(path.resolve()).sha256 for path in files}


@dataclass(frozen=True)
class Target:
    """A model to run, with its run if it has one; `before` is the same model before training, if that is known."""

    source: ModelSource
    plan: RunPlan | None = None
    before: ModelSource | None = None
    step: int | None = None  # of the run; None without one

    @property
    def data(self) -> DataSpec | None:
        return self.plan.recipe.data if self.plan else None


@dataclass(frozen=True)
class MeasureSettings:
    """Settings of an evaluation on at most `limit` rows."""

    metrics: tuple[str, ...] = ()  # of completions; selected by the data if empty
    limit: int = 200
    max_new_tokens: int = 128
    batch_size: int = 16  # completions per batch
    file: str | None = None  # the validation split if None


def find_target(reference: str, workspace: Workspace) -> Target:
    """Resolve `RUN`, `RUN@STEP`, `RUN@best`, a folder or a hub id to a model.

    A run selects its best step by `evaluation.best`, else the newest step with an export or a checkpoint. A step's
    export takes precedence over its checkpoint: it loads faster, and users share it.
    """
    name, _, step = reference.rpartition("@")
    if not name or Path(reference).is_dir() or not (step.isdecimal() or step in ("best", "last")):
        name, step = reference, ""
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "plan.json").is_file():
        return Target(_model_folder(folder.resolve(), reference))
    if folder.is_dir():
        layout = RunLayout(folder.resolve())
    elif is_path(name):
        raise NotFoundError(f"folder {folder} not found", fix="give the folder of a model or a run")
    elif "/" in name and not step:
        return Target(fetch_model(reference))
    else:
        run, step = find_run_step(reference, workspace)
        layout = run.layout
    plan = read_plan_to_use(layout)
    untrained = TrainedStep(layout, plan, 0)
    if step == "0":
        return Target(untrained, plan, untrained, 0)
    exports, checkpoints = _exports(layout), [step for step, _ in layout.list_checkpoints()]
    chosen = choose_step(layout, step, {*exports, *checkpoints})
    trained = TrainedStep(layout, plan, chosen)
    if chosen in exports:
        export = ModelFolder(exports[chosen], trained.label, Workspace(plan.workspace).hub_home)
        if not (export.is_adapter and plan.recipe.model.weights == "random"):
            return Target(export, plan, _before(export, plan) or untrained, chosen)
    return Target(trained, plan, untrained, chosen)


def _before(export: ModelFolder, plan: RunPlan) -> ModelFolder | None:
    """Return the model before training if training quantized its base: adapters are loaded onto the unquantized one."""
    if not export.is_adapter or plan.recipe.training.quantization == "none":
        return None
    earlier, label = plan.recipe.model.adapter, f"{plan.id}@0, unquantized"
    folder = export.folder if earlier is None else Path(earlier)
    return replace(export, folder=folder, label=label, is_base=earlier is None)


def _exports(layout: RunLayout) -> dict[int, Path]:
    """Return the exports in a run's folder by their steps; for each step, the last one takes precedence."""
    named = sorted(layout.exports.glob("step-*"), key=lambda folder: folder.name, reverse=True)
    found = {}
    for folder in (*named, layout.export):
        if not (folder / CONFIG_FILE).is_file() and not (folder / ADAPTER_CONFIG).is_file():
            continue
        step = (read_json_if_valid(folder / EXPORT_RECORD, dict[str, object]) or {}).get("step")
        if isinstance(step, int):
            found[step] = folder
        elif folder == layout.export:  # another program wrote it: the last step
            found[max((step for step, _ in layout.list_checkpoints()), default=1)] = folder
    return found


def fetch_model(name: str, revision: str | None = None, hub_home: Path = _HUB_CACHE) -> ModelFolder:
    """Return the folder of a model by its path or hub id; a hub model is downloaded once.

    Raises:
        NotFoundError: there is none.
    """
    if is_path(name) or Path(name).is_dir():
        return _model_folder(Path(name).expanduser(), name)
    return ModelFolder(download_weights(ModelSpec(weights=name, revision=revision), os.environ, hub_home), name)


def find_base(plan: RunPlan) -> Path | None:
    """Return the folder of a run's initial weights; None if they were random."""
    model, home = plan.recipe.model, Workspace(plan.workspace).hub_home
    return None if model.weights == "random" else fetch_model(model.weights, model.revision, home).folder


def _model_folder(folder: Path, label: str) -> ModelFolder:
    if not (folder / CONFIG_FILE).is_file() and not (folder / ADAPTER_CONFIG).is_file():
        raise NotFoundError(
            f"{folder} has neither {CONFIG_FILE} nor {ADAPTER_CONFIG}",
            meaning="it is not the folder of a model, or a copy was interrupted",
            fix="give the export of a run, or a model in Hugging Face's layout",
        )
    return ModelFolder(folder, label)
