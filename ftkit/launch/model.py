"""Resolve a model: its shape and parameter counts, from its config.json or its class."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass, replace
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
from ftkit.models.architecture import NO_CAUSAL_CLASS, UNKNOWN_FAMILY, ArchitectureSpec, ModelCounts, ModelSpec
from ftkit.models.config_json import check_loadable, text_part
from ftkit.models.families import FAMILIES, family_of
from ftkit.models.folder import check_folder, holds_adapters, read_model_config
from ftkit.paths import is_path
from ftkit.planning.layout import Workspace
from ftkit.planning.planner import plan_model
from ftkit.spec import RUN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftkit.models.architecture import ModelPlan
    from ftkit.planning.plan import RunPlan

PROGRAM = ("-m", "ftkit.train", "--count")
NEEDED = ("torch", "transformers", "accelerate")
TIMEOUT_SECONDS = 120
CACHE_VERSION = 5
"""To be increased when the counting program returns other counts for the same configuration."""


@dataclass(frozen=True)
class CountedModel:
    """The output of the counting program for a model.

    Attributes:
        config: configuration of its text part, with transformers' defaults.
        counts: parameter counts.
    """

    config: dict[str, Any]
    counts: ModelCounts


def resolve_model(model: ModelSpec, environment: Mapping[str, str], workspace: Workspace) -> ModelPlan:
    """Resolve a model's shape, parameter counts, and, if the hub's cache has it, the commit of its revision.

    `run:NAME` is the result of that run: its export, or its adapters on their base model. A folder of adapters means
    its base model with these adapters.

    The configuration comes from the model's folder, the hub's cache, ftkit's shipped configurations, or the hub.
    Families with a formula need nothing else. For others, the parameters of the model class are counted, without
    weights, if torch is installed: in another process, because neither the plan nor the command line imports torch. The
    counts are cached by the digest of the configuration. Without torch, they are estimated from config.json.

    Raises:
        ConfigError: the recipe contradicts the configuration, or the shape is incomplete.
        NotFoundError: the hub has no such model, the configuration can't be read, or there is no such run or export.
        PrerequisiteError: the model is gated, or access to it is denied.
    """
    is_run = model.weights.startswith(RUN)
    if not is_run and not (is_path(model.weights) and holds_adapters(Path(model.weights))):
        return _resolve(model, environment, workspace.hub_home)
    from ftkit.launch.trained_model import continue_adapters, continue_run  # noqa: PLC0415 - few models are trained ones

    continued = continue_run(model, workspace) if is_run else continue_adapters(model)
    plan = continued.plan or _resolve(continued.model, environment, workspace.hub_home)
    return plan.model_copy(update={"adapter": continued.adapter, "trained": continued.trained, "source": model.weights})


def _resolve(model: ModelSpec, environment: Mapping[str, str], home: Path) -> ModelPlan:
    folder = find_folder(model, environment, home)
    if folder is None and is_path(model.weights) and Path(model.weights).exists():
        check_folder(Path(model.weights))  # refuses it: it has no config.json, or is a file
    config = None if folder is None else read_model_config(folder)
    if folder is None and model.weights != "random" and not is_path(model.weights):
        config = _shipped_config(model)
        if config is None and not isinstance(model.architecture, ArchitectureSpec):
            from ftkit.hub.readiness import fetch_config  # noqa: PLC0415 - the hub's client

            config = fetch_config(model, environment, home)
            folder = find_folder(model, environment, home)
    if config is not None:
        check_loadable(config, model.weights)
    plan = _plan(model, config, environment)
    if model.added_tokens:
        plan = _with_added_tokens(plan, model, config, environment, home)
    if folder is not None and not is_path(model.weights):
        plan = _pin_revision(plan, environment, home)
    return plan


def pin_revision(plan: RunPlan, environment: Mapping[str, str]) -> RunPlan:
    """Resolve the revision of a hub model to a commit, so that the job loads the same weights as checked now.

    If the hub does not respond, the plan does not change. Raises as `resolve_model` does.
    """
    model, home = plan.recipe.model, Workspace(plan.workspace).hub_home
    pinned = _pin_revision(model, {**environment, **plan.cluster.environment}, home)
    return replace(plan, recipe=plan.recipe.model_copy(update={"model": pinned}))


def _pin_revision(model: ModelPlan, environment: Mapping[str, str], home: Path) -> ModelPlan:
    from ftkit.hub.readiness import find_commit  # noqa: PLC0415 - the hub's client

    commit = find_commit(model, environment, home)
    if commit is None or commit == model.revision:
        return model
    return model.model_copy(update={"revision": commit, "requested_revision": model.revision})


def _plan(model: ModelSpec, config: dict[str, Any] | None, environment: Mapping[str, str]) -> ModelPlan:
    shape, query = model.architecture, None
    if config is not None:
        query = None if family_of(str(text_part(config).get("model_type"))).has_formula else {"config": config}
    elif model.weights == "random" and not family_of(str(shape.family)).has_formula:
        query = {"architecture": shape.model_dump(mode="json")}
    counted = None if query is None else _count(query, environment)
    if isinstance(counted, CountedModel):
        return plan_model(model, None if config is None else counted.config, counted.counts)
    if counted is None:
        return plan_model(model, config)
    try:
        return plan_model(model, config).model_copy(update={"count_error": counted.reason})
    except ConfigError as error:
        fix = f"Building the model's class failed too: {counted.reason}. Correct config.json, or choose another model."
        raise ConfigError([replace(problem, fix=fix) for problem in error.problems]) from error


def _with_added_tokens(
    plan: ModelPlan, model: ModelSpec, config: dict[str, Any] | None, environment: Mapping[str, str], home: Path
) -> ModelPlan:
    """Return the plan with enough rows in the embedding for the added tokens, and with the new ones among them.

    Raises:
        ConfigError: the tokenizer's vocabulary can't be read from here, or the model's embeddings can't be resized.
    """
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
    if tokenizer.vocab_size is not None:  # it is not trained yet: all but its own special tokens are new
        return Vocabulary({}, tokenizer.vocab_size)
    from ftkit.hub.readiness import fetch_files  # noqa: PLC0415 - the hub's client

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


def _shipped_config(model: ModelSpec) -> dict[str, Any] | None:
    """Return the configuration that ftkit ships for a hub model; None if it ships none, or for another revision."""
    return shipped_config(model.weights) if model.revision is None else None


@dataclass(frozen=True)
class _NotCounted:
    """The reason why the counting program failed."""

    reason: str


def _count(query: dict[str, Any], environment: Mapping[str, str]) -> CountedModel | _NotCounted | None:
    """Return the counting program's result, or why it failed; None if packages for it are missing here.

    Raises:
        ConfigError: transformers does not have this family, or no causal language model of it.
    """
    if not all(find_spec(package) for package in NEEDED):
        return None
    text = json.dumps(query, sort_keys=True)
    cache = _cache_file(text, environment)
    if (known := read_json_if_valid(cache, CountedModel)) is not None:
        return known
    quiet = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = process.run(
            [sys.executable, *PROGRAM, text],
            timeout_seconds=TIMEOUT_SECONDS,
            environment={**os.environ, **environment, **quiet},
        )
    except FtkitError as error:
        return _NotCounted(one_line(error.what))
    if done.returncode == NO_CAUSAL_CLASS:
        raise ConfigError([_no_causal_class(query)])
    if done.returncode == UNKNOWN_FAMILY:
        raise ConfigError([_unknown_family(query)])
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2]
        return _NotCounted(one_line(last) if last else f"exit code {done.returncode}")
    try:
        counted = parse_json(done.stdout.strip().rpartition("\n")[2], CountedModel)
    except InvalidJsonError as error:
        return _NotCounted(one_line(error))
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_json(cache, counted)
    except OSError:  # the home folder is full: count again next time
        pass
    return counted


def _no_causal_class(query: dict[str, Any]) -> Problem:
    key, family = _family_in(query)
    return Problem(
        "",
        key,
        f"transformers has no causal language model for '{family}', so ftkit can't train it on text.",
        "Choose a text-only model, or another family, such as Gemma 3 or Mistral Small 3.",
    )


def _family_in(query: dict[str, Any]) -> tuple[str, str]:
    """Return the key of the recipe that chose the family, and the family."""
    if "config" in query:
        return "model.weights", query["config"]["model_type"]
    return "model.architecture.family", query["architecture"]["family"]


def _unknown_family(query: dict[str, Any]) -> Problem:
    from importlib.metadata import version  # noqa: PLC0415 - tens of milliseconds, for an error alone

    here, (key, family) = f"transformers {version('transformers')}", _family_in(query)
    if "architecture" in query:
        what = f"{here} does not have the family '{family}'."
        fix = f"Use {', '.join(sorted(FAMILIES))}, or the model_type of another causal language model in transformers."
    elif query["config"].get("auto_map"):
        what = f"'{family}' comes with custom code (auto_map in config.json), and {here} does not have it."
        fix = (
            "ftkit never runs code that comes with a model. Choose a model whose model_type is in transformers; many "
            "are also published in its layout. If a newer transformers has it, install that here and in the image."
        )
    else:
        what = f"{here} does not have the model_type '{family}' of config.json."
        fix = "Install a newer transformers that has it, here and in the image, or choose another model."
    return Problem("", key, what, fix)


def _cache_file(text: str, environment: Mapping[str, str]) -> Path:
    """Return the file that caches the counts of a configuration, for this version of transformers."""
    from importlib.metadata import version  # noqa: PLC0415 - tens of milliseconds, for models without a formula alone

    key = f"{CACHE_VERSION} {version('transformers')} {text}"
    return Path(cache_folder(environment), "model-counts", f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json")
