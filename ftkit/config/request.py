"""Inputs of one run besides recipe and profile: settings, arguments, and properties of this machine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ftkit.config.cluster import ClusterProfile
from ftkit.config.context import Context, read_settings_layers, settings_files, workspace_folder
from ftkit.config.image_reference import AnyImage
from ftkit.config.layers import COMMAND_LINE, Layers
from ftkit.config.problems import validate
from ftkit.config.recipe import RecipeSpec
from ftkit.models.architecture import ModelPlan
from ftkit.spec import Name, Spec

if TYPE_CHECKING:
    from ftkit.errors import Problem


class Settings(Spec):
    """The keys of `ftkit.yaml`, of the user's `config.yaml`, and of `FTKIT_*` variables."""

    cluster: Name = "local"
    """Cluster to run on when `--cluster` is not given."""
    image: str | None = None
    """Image to run in when `--image` is not given."""
    workspace: str = "."
    """Folder with `runs/`, `data/` and `images/`; on a cluster, on its shared file system."""
    registry: str | None = None
    """Registry that `ftkit push` pushes to and `ftkit import` imports from: `HOST` or `HOST/PATH`."""


class LoadedSettings(NamedTuple):
    """Settings, with the origin of each and the files that were searched for."""

    settings: Settings
    layers: Layers
    files: dict[Path, bool]

    @property
    def has_cluster(self) -> bool:
        """Whether an option, a variable or a file sets the cluster."""
        return ("cluster",) in self.layers.origins

    def workspace_folder(self, ctx: Context) -> Path:
        """Return the workspace's folder; a relative path is relative to the project."""
        return workspace_folder(self.layers, ctx)


def load_settings(ctx: Context, options: Layers | None = None) -> LoadedSettings:
    """Read the user's file, the project's file, `FTKIT_*` variables and options; later wins.

    Raises ConfigError with every problem found.
    """
    layers = read_settings_layers(ctx, Settings.model_fields, options)
    return LoadedSettings(validate(Settings, layers), layers, {path: path.is_file() for path in settings_files(ctx)})


@dataclass(frozen=True)
class Origins:
    """Origins of a run's values: file and line, or the command line."""

    recipe: Layers = field(default_factory=Layers)
    cluster: Layers = field(default_factory=Layers)
    settings: Layers = field(default_factory=Layers)

    def locate(self, problem: Problem) -> Problem:
        """Add the origin of its key to a problem in one of the three specs."""
        path = tuple(problem.key.split("."))
        for spec, layers in ((Settings, self.settings), (RecipeSpec, self.recipe), (ClusterProfile, self.cluster)):
            if path[0] in spec.model_fields and path[:1] in layers.origins:
                where = layers.origin(path)
                is_default = where == COMMAND_LINE and layers.value(path) is None  # next to a key from the command line
                return problem if is_default else replace(problem, where=where)
        return problem


@dataclass(frozen=True)
class RunRequest:
    """Inputs of one run besides the recipe and the profile."""

    name: str | None  # the recipe's if None
    num_nodes: int | None  # `--nodes`; the recipe's number if None
    gpus_per_node: int | None  # `--gpus-per-node`; the recipe's number, else the cluster's, if None
    image: AnyImage | None
    image_is_explicit: bool  # whether `--image` sets it rather than a configuration file
    workspace: Path
    python: str  # the interpreter that ftkit runs in, for runtime `none`
    created: datetime  # when the run was requested, in UTC
    suffix: str  # makes the run's id unique
    data_stamp: str = ""  # text that changes when the recipe's files change
    num_packs: int | None = None  # packs of the training split, if the data is already prepared
    num_tokens: int | None = None  # tokens of their documents, without padding
    num_targets: int | None = None  # tokens of them in the loss
    padding: float | None = None
    """Ratio of the tokens of padded rows to those of packs; None if unknown."""
    model: ModelPlan | None = None
    """The model with its complete shape and parameter counts; None if the recipe's shape is complete."""
    processes_per_node: int | None = None
    """`--processes-per-node`: without GPUs, in place of `gpus_per_node`."""
    teacher: ModelPlan | None = None  # the teacher of objective distill, as `model`
    origins: Origins = field(default_factory=Origins)
