"""The configurations of published models that ftkit ships, so that their recipes are planned without a network.

Each file holds what matters of a config.json (its text part), and under `models` the hub ids that have it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftkit import assets
from ftkit.config.yaml_files import read_yaml

if TYPE_CHECKING:
    from pathlib import Path


def shipped_config(weights: str) -> dict[str, Any] | None:
    """Return the configuration of a model of the hub; None: it is not shipped."""
    for path in sorted(assets.ARCHITECTURES.glob("*.yaml")):
        if weights in path.read_text(encoding="utf-8"):  # to parse them all would take longer than to plan
            config, models = read_shipped(path)
            if weights in models:
                return config
    return None


def read_shipped(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Read a file: the configuration, and the hub ids that have it."""
    config = dict(read_yaml(path).values)
    return config, tuple(config.pop("models", ()))
