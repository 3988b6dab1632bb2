"""Configurations of published models that ftkit ships, so that their recipes are planned without a network."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ftkit import assets
from ftkit.config.yaml_files import read_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def shipped_config(weights: str) -> dict[str, Any] | None:
    """Return the shipped configuration of a hub model; None if there is none."""
    for path in sorted(assets.ARCHITECTURES.glob("*.yaml")):
        if weights in path.read_text(encoding="utf-8"):  # parsing all files would take longer than planning
            config, models = read_shipped(path)
            if weights in models:
                return config
    return None


def read_shipped(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Read a shipped file: return the configuration, and the hub ids of the models that have it."""
    config = dict(_shipped_values(path))
    return config, tuple(config.pop("models", ()))


@cache
def _shipped_values(path: Path) -> Mapping[str, Any]:
    return read_yaml(path).values
