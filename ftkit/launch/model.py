"""Resolve a model: its shape and parameter counts, from its config.json or its class."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftkit import process
from ftkit.config.context import cache_folder
from ftkit.config.load import shipped_config
from ftkit.data.tokenizer_files import VOCABULARY_FILES, Vocabulary, read_vocabulary
from ftkit.errors import ConfigError, FtkitError, Problem, one_line
from ftkit.files import InvalidJsonError, parse_json, read_json_if_valid, write_json
from ftkit.hub.client import TOKENIZER_FILE, find_folder
from ftkit.hub.readiness import fetch_config, fetch_files, find_commit
from ftkit.models.architecture import (
    MULTIMODAL,
    NO_CAUSAL_CLASS,
    UNKNOWN_FAMILY,
    ArchitectureSpec,
    ModelCounts,
    ModelPlan,
    ModelSpec,
)
from ftkit.models.config_json import check_loadable, text_part
from ftkit.models.families import FAMILIES, family_of
from ftkit.models.folder import check_folder, holds_adapters, read_model_config, read_processor
from ftkit.models.vision import read_vision
from ftkit.paths import is_path
from ftkit.planning.layout import Workspace
from ftkit.planning.planner import plan_model
from ftkit.spec import RUN

if TYPE_CHECKING:
    from ftkit.planning.plan import RunPlan

PROGRAM = ("-m", "ftkit.train", "--count")
NEEDED = ("torch", "transformers", "accelerate")
TIMEOUT_SECONDS = 120
CACHE_VERSION = 6  # increase it if the counting program's results change for the same configuration


@dataclass(frozen=True)
class CountedModel:
    """Output of the counting program: parameter counts, and the text configuration with transformers' defaults."""

    config: dict[str, Any]
    counts: ModelCounts
    vision: CountedVision | None = None


@dataclass(frozen=True)
class CountedVision:
    """The configuration of a vision tower with transformers' defaults; parameters of the tower and the projector."""

    config: dict[str, Any]
    sizes: tuple[int, int]


def resolve_model(model: ModelSpec, environment: Mapping[str, str], workspace: Workspace) -> ModelPlan:
    """Resolve a model's shape, parameter counts, and, if the hub's cache has it, the commit of its revision.

    `run:NAME` is the result of that run: its export, or its adapters on their base model. A folder of adapters means
    its base model with these adapters. The configuration comes from the model's folder, the hub's cache, ftkit's
    shipped configurations, or the hub. Families with a formula need nothing else. For other families, another process
    counts the parameters of the model class, because neither the plan nor the command line imports torch; counts are
    cached by the digest of the configuration. Without torch, they are estimated from config.json.
    """
    is_run = model.weights.startswith(RUN)
    if not is_run and not (is_path(model.weights) and holds_adapters(Path(model.weights))):
        return _resolve(model, environment, workspace.hub_home)
    from ftkit.launch.trained_model import continue_adapters, continue_run  # noqa: PLC0415 - reads runs

    continued = continue_run(model, workspace) if is_run else continue_adapters(model)
    plan = continued.plan or _resolve(continued.model, environment, workspace.hub_home)
    return plan.model_copy(update={"adapter": continued.adapter, "trained": continued.trained, "source": model.weights})


def _resolve(model: ModelSpec, environment: Mapping[str, str], home: Path) -> ModelPlan:
    folder = find_folder(model, environment, home)
    if folder is None and is_path(model.weights) and Path(model.weights).exists():
        check_folder(Path(model.weights))  # raises the error: there is no config.json, or it is a file
    config = None if folder is None else read_model_config(folder)
    if folder is None and model.weights != "random" and not is_path(model.weights):
        config = shipped_config(model.weights) if model.revision is None else None
        if config is None and not isinstance(model.architecture, ArchitectureSpec):
            config = fetch_config(model, environment, home)
            folder = find_folder(model, environment, home)
    if config is not None:
        check_loadable(config, model.weights)
    plan = _plan(model, config, environment)
    vision = config and read_vision(config, {} if folder is None else read_processor(folder))
    plan = plan.model_copy(update={"vision": vision})
    if model.added_tokens:
        plan = _with_added_tokens(plan, model, config, environment, home)
    if folder is not None and not is_path(model.weights):
        plan = _pin_revision(plan, environment, home)
    return plan


def with_vision(model: ModelPlan, environment: Mapping[str, str], workspace: Workspace) -> ModelPlan:
    """Add the vision part to a model's shape, counted on the model class if torch is installed."""
    vision, folder = model.vision, find_folder(model, environment, workspace.hub_home)
    if vision is not None and folder is not None:
        config = read_model_config(folder)
        counted = _count({"config": config, "pictures": True}, environment)
        if isinstance(counted, CountedModel) and counted.vision is not None:
            tower, projector = counted.vision.sizes
            vision = read_vision({**config, "vision_config": counted.vision.config}, read_processor(folder)) or vision
            vision = replace(vision, tower=tower, projector=projector, is_counted=True)
    shape = model.architecture.model_copy(update={"vision": vision})
    return model.model_copy(update={"vision": vision, "architecture": shape})


def pin_revision(plan: RunPlan, environment: Mapping[str, str]) -> RunPlan:
    """Pin revisions of hub models to commits, so that the job loads the checked files; unchanged without the hub."""
    home, known = Workspace(plan.workspace).hub_home, {**environment, **plan.cluster.environment}
    models = {"model": plan.recipe.model, "teacher": plan.recipe.teacher}
    pinned = {name: model and _pin_revision(model, known, home) for name, model in models.items()}
    return replace(plan, recipe=plan.recipe.model_copy(update=pinned))


def _pin_revision(model: ModelPlan, environment: Mapping[str, str], home: Path) -> ModelPlan:
    commit = find_commit(model, environment, home)
    if commit is None or commit == model.revision:
        return model
    return model.model_copy(update={"revision": commit, "requested_revision": model.revision})


def _plan(model: ModelSpec, config: dict[str, Any] | None, environment: Mapping[str, str]) -> ModelPlan:
    shape, query = model.architecture, None
    family = family_of(str(shape.family))
    if config is not None:
        query = None if family_of(str(text_part(config).get("model_type"))).has_formula else {"config": config}
    elif model.weights == "random" and (family.usual_experts or not family.has_formula):
        query = {"architecture": shape.model_dump(mode="json")}
    counted = None if query is None else _count(query, environment)
    if isinstance(counted, CountedModel):
        return plan_model(model, None if config is None else counted.config, counted.counts)
    if counted is None:
        return plan_model(model, config)
    try:
        return plan_model(model, config).model_copy(update={"count_error": counted})
    except ConfigError as error:
        fix = f"Building the model's class failed too: {counted}. Correct config.json, or choose another model."
        raise ConfigError([replace(problem, fix=fix) for problem in error.problems]) from error


def _with_added_tokens(
    plan: ModelPlan, model: ModelSpec, config: dict[str, Any] | None, environment: Mapping[str, str], home: Path
) -> ModelPlan:
    """Return the plan with enough embedding rows for the added tokens, and with the list of new tokens."""
    added, rows = model.added_tokens, plan.architecture.vocab_size
    vocabulary = _read_vocabulary(model, environment, home)
    tokens = vocabulary.with_tokens(added).ids
    needed, new = 1 + max(tokens[token] for token in added), vocabulary.lacking(added)
    if needed <= rows:
        return plan.model_copy(update={"new_tokens": new})
    if config is not None:
        text = text_part(config)
        if text.get("hidden_size_per_layer_input"):
            what = f"{text.get('model_type')} has an embedding in each layer, which can't be resized."
            fix = f"Leave out tokens that don't fit into its {rows:,} rows."
            raise ConfigError([Problem("", "model.added_tokens", what, fix)])
        inner = config.get("text_config")
        update = {"vocab_size": needed} if text is config else {"text_config": {**(inner or {}), "vocab_size": needed}}
        config = config | update
    shape = model.architecture
    if shape.vocab_size is not None:
        shape = shape.model_copy(update={"vocab_size": needed})
    grown = _plan(model.model_copy(update={"architecture": shape}), config, environment)
    return grown.model_copy(update={"new_tokens": new, "vocab_size_of_weights": rows})


def _read_vocabulary(model: ModelSpec, environment: Mapping[str, str], home: Path) -> Vocabulary:
    tokenizer = model.tokenizer
    if tokenizer.vocab_size is not None:  # not trained yet: all tokens except its own special tokens are new
        return Vocabulary({}, tokenizer.vocab_size)
    owner = model if tokenizer.source == "model" else ModelSpec(weights=tokenizer.source)
    is_folder = is_path(owner.weights)
    folder = Path(owner.weights) if is_folder else fetch_files(owner, VOCABULARY_FILES, environment, home)
    if folder is not None and (found := read_vocabulary(folder)) is not None:
        return found
    what = f"the {TOKENIZER_FILE} of '{owner.weights}' can't be read from here, so its tokens can't be counted."
    fix = "Give a folder that has it: tokenizer.save_pretrained(FOLDER) writes it; set model.tokenizer.source=FOLDER."
    if not is_folder:
        fix = f"Where there is a network: hf download {owner.weights} {' '.join(VOCABULARY_FILES[:2])}."
    raise ConfigError([Problem("", "model.added_tokens", what, fix)])


def _count(query: dict[str, Any], environment: Mapping[str, str]) -> CountedModel | str | None:
    """Return the counting program's result, or the reason for its failure; None if its packages are missing here."""
    if not all(find_spec(package) for package in NEEDED):
        return None
    text = json.dumps(query, sort_keys=True)
    digest = hashlib.sha256(f"{CACHE_VERSION} {version('transformers')} {text}".encode()).hexdigest()
    cache = Path(cache_folder(environment), "model-counts", f"{digest[:32]}.json")
    if (known := read_json_if_valid(cache, CountedModel)) is not None:
        return known
    quiet = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
    variables = {**os.environ, **environment, **quiet}
    try:
        done = process.run([sys.executable, *PROGRAM, text], timeout_seconds=TIMEOUT_SECONDS, environment=variables)
    except FtkitError as error:
        return one_line(error.what)
    if done.returncode in {MULTIMODAL, NO_CAUSAL_CLASS, UNKNOWN_FAMILY}:
        raise ConfigError([_explain_exit(done.returncode, query, done.stdout)])
    if done.returncode != 0:
        return one_line(done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}")
    try:
        counted = parse_json(done.stdout.strip().rpartition("\n")[2], CountedModel)
    except InvalidJsonError as error:
        return one_line(error)
    with suppress(OSError):  # the home folder is full: count again next time
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_json(cache, counted)
    return counted


def _explain_exit(code: int, query: dict[str, Any], text_family: str) -> Problem:
    """Return the problem if transformers does not have a family, or no causal language model of it."""
    config, here = query.get("config"), f"transformers {version('transformers')}"
    key = "model.architecture.family" if config is None else "model.weights"
    family = query["architecture"]["family"] if config is None else config["model_type"]
    if code == NO_CAUSAL_CLASS:
        what = f"transformers has no causal language model for '{family}', so ftkit can't train it on text."
        fix = "Choose a text-only model, or another family, such as Gemma 3 or Mistral Small 3."
    elif code == MULTIMODAL:
        what = f"'{family}' is a multimodal model, whose text model is of another family."
        fix = f"Use {text_family}."
    elif config is None:
        what = f"{here} does not have the family '{family}'."
        fix = f"Use {', '.join(sorted(FAMILIES))}, or the model_type of another causal language model in transformers."
    else:
        what = f"{here} does not have the model_type '{family}' of config.json."
        fix = "Install a newer transformers that has it, here and in the image, or choose another model."
        if config.get("auto_map"):
            fix += " ftkit never runs the code that comes with a model (auto_map in config.json)."
    return Problem("", key, what, fix)
