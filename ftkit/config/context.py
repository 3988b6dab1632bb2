"""The context of one call of ftkit: the settings, recipes, cluster profiles and images that it finds.

Names are looked up in the project, then in the user's configuration, then among the files that ftkit ships. This
module imports no pydantic, because shell completion must be fast.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from ftkit import assets
from ftkit.config.layers import Layers
from ftkit.errors import NotFoundError
from ftkit.paths import absolute_path

PROJECT_FILE = "ftkit.yaml"
ROOT = Path("/")
"""The folder with the machine's /dev, /proc and /sys; only tests have another one."""


@dataclass(frozen=True)
class Context:
    """The context of this call: the project's folder, the user's configuration, the environment, the machine's root."""

    project: Path
    user: Path
    environment: Mapping[str, str]
    root: Path = field(default_factory=lambda: ROOT)

    @classmethod
    def here(cls) -> Context:
        """Create the context from the current folder and the process's environment.

        Raises:
            NotFoundError: the current folder was removed.
        """
        try:
            current = Path.cwd()
        except FileNotFoundError as error:
            raise NotFoundError(
                "the current folder no longer exists", meaning="it was removed or moved", fix="cd to another folder"
            ) from error
        inside = [folder for folder in (current, *current.parents) if os.path.lexists(folder / PROJECT_FILE)]
        xdg = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
        user = Path(xdg).expanduser() / "ftkit"
        return cls(inside[0] if inside else current, user, os.environ)


def set_home(environment: MutableMapping[str, str]) -> None:
    """Set HOME if it is unset or empty: to the account's home folder, or to `/`, as containers do, without an account.

    Python and libraries end with an error if neither HOME nor an account tells them.
    """
    if not environment.get("HOME"):
        environment["HOME"] = _account_home() or "/"


def _account_home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return ftkit's cache folder, in `$XDG_CACHE_HOME` or `~/.cache`."""
    home = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or "~").expanduser() / ".cache"
    return Path(home, "ftkit")


def list_names(kind: str, ctx: Context) -> list[str]:
    """Return the names of all recipes or clusters (`kind`), those of the project first."""
    names = [path.stem for folder in search_folders(kind, ctx) for path in _files(folder, "*.yaml")]
    return list(dict.fromkeys(names))


def list_images(ctx: Context) -> list[str]:
    """Return `NAME:TAG` of every defined image."""
    paths = [path for folder in search_folders("image", ctx) for path in _files(folder, "*/*/image.yaml")]
    return list(dict.fromkeys(f"{path.parts[-3]}:{path.parts[-2]}" for path in paths))


def _files(folder: Path, pattern: str) -> list[Path]:
    """Return the files that match a pattern, without links to files that are not there."""
    return [path for path in sorted(folder.glob(pattern)) if path.is_file()]


def search_folders(kind: str, ctx: Context) -> list[Path]:
    """Return the folders in which `kind` is looked up, first match first."""
    folder, *shipped = {
        "recipe": (Path("recipes"), assets.EXAMPLES, assets.RECIPES),
        "cluster": (Path("clusters"), assets.CLUSTERS),
        "image": (Path("containers"), assets.CONTAINERS),
    }[kind]
    return list(dict.fromkeys([ctx.project / folder, ctx.user / folder, *shipped]))


def settings_files(ctx: Context) -> list[Path]:
    """Return the files for settings: the user's, then the project's."""
    return [ctx.user / "config.yaml", ctx.project / PROJECT_FILE]


def read_settings_layers(ctx: Context, keys: Iterable[str], options: Layers | None = None) -> Layers:
    """Read the user's file, the project's file, `FTKIT_*` variables of `keys`, and options; later wins.

    Values are not validated.
    """
    layers = Layers()
    for path in settings_files(ctx):
        if os.path.lexists(path):
            from ftkit.config.yaml_files import read_yaml  # noqa: PLC0415 - slow to import for shell completion, and few users have such a file

            layers = read_yaml(path).over(layers)
    given = {key: value for key in keys if (value := ctx.environment.get(f"FTKIT_{key.upper()}"))}
    layers = Layers(dict(given), {(key,): f"FTKIT_{key.upper()}" for key in given}).over(layers)
    return options.over(layers) if options else layers


def workspace_folder(layers: Layers, ctx: Context) -> Path:
    """Return the workspace's folder; a relative path is relative to the project.

    Raises:
        ConfigError: the path is impossible.
    """
    key = ("workspace",)
    return absolute_path(layers.value(key) or ".", ctx.project, layers.origin(key), "workspace")
