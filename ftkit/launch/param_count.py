"""Count the parameters of models whose family has no formula."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ftkit import process
from ftkit.config.model import ModelCounts
from ftkit.errors import FtkitError
from ftkit.files import InvalidJsonError, parse_json, read_json_if_valid
from ftkit.hub import find_folder
from ftkit.model_folder import CONFIG_FILE
from ftkit.planning.estimates.parameters import count_by_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ftkit.config.model import ModelSpec
    from ftkit.planning.layout import Workspace

PROGRAM = "ftkit.train.param_count"
NEEDED = ("torch", "transformers", "accelerate")
TIMEOUT_SECONDS = 120


def count_on_this_machine(model: ModelSpec, environment: Mapping[str, str], workspace: Workspace) -> ModelCounts | None:
    """Count the parameters of a model that isn't one of `FAMILIES`.

    For some mixtures of experts, config.json and a formula give the count. For other models, a process with torch
    builds the model without its weights and counts; that needs torch and config.json on this machine (a model without
    pretrained weights needs no config.json). Elsewhere config.json gives an estimate.

    Returns:
        None if the family has a formula, or there is nothing to count.
    """
    if not model.architecture.is_estimated:
        return None
    folder = find_folder(model, environment, workspace.hub_home)
    if folder is None:
        return _count_model(model, None, environment) if model.weights == "random" else None
    config = read_json_if_valid(folder / CONFIG_FILE, dict[str, Any])
    by_config = None if config is None else count_by_config(model.architecture, config)
    if by_config is not None and by_config.is_exact:
        return by_config
    return _count_model(model, folder, environment) or by_config


def _count_model(model: ModelSpec, folder: Path | None, environment: Mapping[str, str]) -> ModelCounts | None:
    """Run the counting program; return None if it can't run here, or can't build the model."""
    if not all(find_spec(package) for package in NEEDED):
        return None
    asked: dict[str, Any] = {
        "architecture": model.architecture.model_dump(mode="json"), "folder": None if folder is None else str(folder)
    }  # fmt: skip
    quiet = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = process.run(
            [sys.executable, "-m", PROGRAM, json.dumps(asked)],
            timeout_seconds=TIMEOUT_SECONDS,
            environment={**os.environ, **environment, **quiet},
        )
        return parse_json(done.stdout.strip().rpartition("\n")[2], ModelCounts) if done.returncode == 0 else None
    except (FtkitError, InvalidJsonError):
        return None
