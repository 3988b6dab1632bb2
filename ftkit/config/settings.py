"""Settings: what a user or a project would otherwise type each time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.config.context import PROJECT_FILE
from ftkit.config.layers import Layers
from ftkit.config.paths import absolute_path
from ftkit.config.problems import validate
from ftkit.config.strict import Name, Spec
from ftkit.config.yaml_files import read_yaml

if TYPE_CHECKING:
    from ftkit.config.context import Context


class Settings(Spec):
    """The keys of `ftkit.yaml`, of the user's `config.yaml`, and of `FTKIT_*` variables."""

    cluster: Name = "local"
    """Cluster to run on when `--cluster` is not given."""
    image: str | None = None
    """Image to run in when `--image` is not given."""
    workspace: str = "."
    """Folder that holds `runs/`, `data/` and `images/`; on a cluster, on its shared file system."""
    registry: str | None = None
    """Registry that `ftkit push` pushes to and `ftkit import` imports from: `HOST` or `HOST/PATH`."""


@dataclass(frozen=True)
class LoadedSettings:
    """Settings, with the place of each and the files that were looked for."""

    settings: Settings
    layers: Layers
    files: dict[Path, bool]

    def workspace_folder(self, ctx: Context) -> Path:
        """Return the workspace's folder; a relative path is relative to the project."""
        where = self.layers.origin(("workspace",))
        return absolute_path(self.settings.workspace, ctx.project, where, "workspace")


def load_settings(ctx: Context, options: Layers | None = None) -> LoadedSettings:
    """Read the user's file, the project's file, `FTKIT_*` variables and options; later wins."""
    files = [ctx.user / "config.yaml", ctx.project / PROJECT_FILE]
    layers = Layers()
    for path in files:
        if path.is_file():
            layers = read_yaml(path).over(layers)
    known = Settings.model_fields
    variables = {key: ctx.environment.get(f"FTKIT_{key.upper()}") for key in known}
    given = {key: value for key, value in variables.items() if value}
    layers = Layers(given, {(key,): f"FTKIT_{key.upper()}" for key in given}).over(layers)
    if options:
        layers = options.over(layers)
    return LoadedSettings(validate(Settings, layers), layers, {path: path.is_file() for path in files})
