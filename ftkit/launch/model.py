"""What a model is: its shape and its parameters, from its config.json or from its own class."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftkit import process
from ftkit.config.model import ArchitectureSpec, ModelCounts
from ftkit.config.model_config import text_part
from ftkit.config.paths import is_path
from ftkit.config.shipped import shipped_config
from ftkit.errors import FtkitError
from ftkit.families import family_of
from ftkit.files import InvalidJsonError, parse_json, read_json_if_valid, write_json
from ftkit.hub import fetch_config, find_commit, find_folder
from ftkit.model_folder import read_model_config
from ftkit.planning.plan import plan_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftkit.config.model import ModelPlan, ModelSpec
    from ftkit.planning.layout import Workspace

PROGRAM = "ftkit.train.param_count"
NEEDED = ("torch", "transformers", "accelerate")
TIMEOUT_SECONDS = 120
CACHE_VERSION = 1
"""Raise it when the counting program answers otherwise."""


@dataclass(frozen=True)
class CountedModel:
    """What the counting program says of a model.

    Attributes:
        config: of its text part, as transformers fills it in.
        counts: of its modules.
    """

    config: dict[str, Any]
    counts: ModelCounts


def resolve_model(model: ModelSpec, environment: Mapping[str, str], workspace: Workspace) -> ModelPlan:
    """Find out a model's shape, count its parameters, and resolve its revision to a commit where that is known here.

    The configuration is that in its folder, in the hub's cache, in what ftkit ships, or on the hub. Families with a
    formula need nothing else. Others are counted on their own class, without weights, where torch is installed: in a
    process of its own, as neither the plan nor the command line imports torch. What it says is cached by the digest of
    the configuration. Elsewhere the parameters are estimated by config.json.

    Raises:
        ConfigError: the recipe contradicts the configuration, or nothing tells the whole shape.
        NotFoundError: the hub has no such model, or the configuration can't be read.
        PrerequisiteError: the model is gated, or there is no right to it.
    """
    home = workspace.hub_home
    folder = find_folder(model, environment, home)
    config = None if folder is None else read_model_config(folder)
    if folder is None and model.weights != "random" and not is_path(model.weights):
        config = _shipped_config(model)
        if config is None and not isinstance(model.architecture, ArchitectureSpec):
            config = fetch_config(model, environment, home)
            folder = find_folder(model, environment, home)
    plan = _plan(model, config, environment)
    if folder is None or is_path(model.weights):
        return plan
    return plan.model_copy(update={"revision": find_commit(model, environment, home)})


def _plan(model: ModelSpec, config: dict[str, Any] | None, environment: Mapping[str, str]) -> ModelPlan:
    shape, asked = model.architecture, None
    if config is not None:
        asked = None if family_of(str(text_part(config).get("model_type"))).has_formula else {"config": config}
    elif model.weights == "random" and not family_of(str(shape.family)).has_formula:
        asked = {"architecture": shape.model_dump(mode="json")}
    counted = None if asked is None else _count(asked, environment)
    if counted is None:
        return plan_model(model, config)
    return plan_model(model, None if config is None else counted.config, counted.counts)


def _shipped_config(model: ModelSpec) -> dict[str, Any] | None:
    """Return the configuration that ftkit ships of a model of the hub; None for another, or another revision."""
    return shipped_config(model.weights) if model.revision is None else None


def _count(asked: dict[str, Any], environment: Mapping[str, str]) -> CountedModel | None:
    """Return what the counting program says; None: it can't run here, or can't build the model."""
    if not all(find_spec(package) for package in NEEDED):
        return None
    text = json.dumps(asked, sort_keys=True)
    cache = _cache_file(text, environment)
    if (known := read_json_if_valid(cache, CountedModel)) is not None:
        return known
    quiet = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = process.run(
            [sys.executable, "-m", PROGRAM, text],
            timeout_seconds=TIMEOUT_SECONDS,
            environment={**os.environ, **environment, **quiet},
        )
        if done.returncode != 0:
            return None
        counted = parse_json(done.stdout.strip().rpartition("\n")[2], CountedModel)
    except (FtkitError, InvalidJsonError):
        return None
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_json(cache, counted)
    except OSError:  # a home without space: it is counted again next time
        pass
    return counted


def _cache_file(text: str, environment: Mapping[str, str]) -> Path:
    """Return where the counts of a configuration are kept, for this version of transformers."""
    from importlib.metadata import version  # noqa: PLC0415 - tens of milliseconds, for models without a formula alone

    home = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or "~").expanduser() / ".cache"
    key = f"{CACHE_VERSION} {version('transformers')} {text}"
    return Path(home, "ftkit", "model-counts", f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json")
