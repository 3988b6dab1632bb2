"""Where one call of ftkit happens, and which recipes, cluster profiles and images it finds there.

Names are looked up in the project, then in the user's configuration, then among the files that ftkit ships. This
module imports no pydantic: the shell completes names with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ftkit import assets

PROJECT_FILE = "ftkit.yaml"


@dataclass(frozen=True)
class Context:
    """Where this call of ftkit happens: the project's folder, the user's configuration, the environment."""

    project: Path
    user: Path
    environment: Mapping[str, str]

    @classmethod
    def here(cls) -> Context:
        """Look at the current folder and the process's environment."""
        current = Path.cwd()
        inside = [folder for folder in (current, *current.parents) if (folder / PROJECT_FILE).is_file()]
        xdg = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
        user = Path(xdg).expanduser() / "ftkit"
        return cls(inside[0] if inside else current, user, os.environ)


def list_names(kind: str, ctx: Context) -> list[str]:
    """Return the names of all recipes or clusters (`kind`), those of the project first."""
    names = [path.stem for folder in search_folders(kind, ctx) for path in sorted(folder.glob("*.yaml"))]
    return list(dict.fromkeys(names))


def list_images(ctx: Context) -> list[str]:
    """Return `NAME:TAG` of every image that is defined."""
    paths = [path for folder in search_folders("image", ctx) for path in sorted(folder.glob("*/*/image.yaml"))]
    return list(dict.fromkeys(f"{path.parts[-3]}:{path.parts[-2]}" for path in paths))


def search_folders(kind: str, ctx: Context) -> list[Path]:
    """Return the folders in which `kind` is looked up, first match first."""
    shipped = {"recipe": assets.RECIPES, "cluster": assets.CLUSTERS, "image": assets.CONTAINERS}[kind]
    folder = {"recipe": "recipes", "cluster": "clusters", "image": "containers"}[kind]
    return list(dict.fromkeys([ctx.project / folder, ctx.user / folder, shipped]))
