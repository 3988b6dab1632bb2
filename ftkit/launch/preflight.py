"""Checks before a job is submitted: files, data, weights, trackers, and memory."""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.config.data import AutoFormat
from ftkit.config.recipe import check_access, check_packages
from ftkit.data.conversations import Conversation
from ftkit.data.formats import check_split, read_example
from ftkit.data.rows import errors_at
from ftkit.data.sources import peek_rows
from ftkit.data.tokenizer_files import check_tokenizer_folder, needs_loading
from ftkit.data.vocabulary import read_vocabulary
from ftkit.errors import (
    DataError,
    FtkitError,
    MemoryExhaustedError,
    NotFoundError,
    PrerequisiteError,
    UnreachableError,
    missing_package_error,
    plural,
)
from ftkit.hub.access import check_data, check_weights
from ftkit.hub.client import TOKENIZER_FILE, find_tokenizer
from ftkit.launch.inputs import data_files, local_paths, read_available, stat_path, with_formats
from ftkit.models.folder import read_end_tokens
from ftkit.models.weight_files import CONFIG_FILE
from ftkit.planning.layout import Workspace
from ftkit.planning.suggestions import CERTAINLY_TOO_LARGE, check_host_memory, suggest_changes
from ftkit.planning.training_setup import GPUS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ftkit.config.cluster import ClusterProfile
    from ftkit.config.data import DataSpec, Format
    from ftkit.config.recipe import RecipePlan, RecipeSpec
    from ftkit.data.rendering import ChatRenderer
    from ftkit.data.rows import Row
    from ftkit.planning.plan import JobPlan, RunPlan
    from ftkit.planning.script import ScriptPlan


@dataclass(frozen=True)
class Findings:
    """The problems found, and warnings about what only the job can check."""

    errors: tuple[FtkitError, ...]
    warnings: tuple[str, ...]

    def raise_errors(self) -> None:
        """Raise the problems that were found.

        Raises:
            FtkitError: the one error.
            ExceptionGroup: there are several.
        """
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise ExceptionGroup("the run would fail", self.errors)


def run_checks(plan: RunPlan, environment: Mapping[str, str]) -> Findings:
    """Check everything that a run needs except its image. All checks run, even if some fail."""
    errors, warnings = [], []
    for check in _checks(plan, environment):
        try:
            warnings += check()
        except FtkitError as error:
            errors.append(error)
    return Findings(tuple(errors), tuple(warnings))


def run_script_checks(plan: ScriptPlan, environment: Mapping[str, str]) -> Findings:
    """Check what a script's run needs except its image."""
    try:
        _check_packages(plan)
    except PrerequisiteError as error:
        return Findings((error,), ())
    return Findings((), tuple(_warn_of_sbatch_variables(plan, environment)))


def _warn_of_sbatch_variables(plan: JobPlan, environment: Mapping[str, str]) -> list[str]:
    if plan.cluster.scheduler != "slurm":
        return []
    from ftkit.launch.scheduler import warn_of_variables  # noqa: PLC0415 - a dry run needs no scheduler

    return warn_of_variables(environment)


def _checks(plan: RunPlan, environment: Mapping[str, str]) -> Iterator[Callable[[], list[str]]]:
    """Yield the checks. Each raises an error, or returns warnings about what can't be checked from here."""
    yield partial(check_trackers, plan, environment)
    yield from source_checks(plan, environment)
    yield partial(_check_packages, plan, *_packages(plan))
    if plan.recipe.sync is not None:
        yield partial(_check_sync, plan.recipe.sync)
    main_gib, is_here = host_memory_gib(), plan.cluster.scheduler == "local"
    yield partial(check_memory, plan, main_gib)
    node_gib = plan.cluster.memory_per_node_gib or (main_gib if is_here else None)
    yield partial(check_host_memory, plan, node_gib, "this machine" if is_here else f"a node of {plan.cluster.name}")
    yield partial(_warn_of_sbatch_variables, plan, environment)


def _check_sync(destination: str) -> list[str]:
    from ftkit.runs.sync import check_destination  # noqa: PLC0415 - fsspec is heavy, and few runs are copied

    check_destination(destination)
    return []


def check_trackers(plan: RunPlan, environment: Mapping[str, str]) -> list[str]:
    """Check that the trackers have their keys and addresses and, without a container, their packages.

    Returns:
        Warnings about variables that the profile's `setup` may set.

    Raises:
        PrerequisiteError: something is missing.
    """
    cluster, tracking = plan.cluster, plan.recipe.tracking
    if cluster.runtime == "none" and cluster.scheduler == "local":
        check_packages(tracking)
    try:
        check_access(tracking, {**environment, **cluster.environment}, sees_home=cluster.runtime == "none")
    except PrerequisiteError as error:
        if not cluster.setup:
            raise
        return [f"{error.what}, unless the lines under 'setup' of cluster {cluster.name} set it"]
    return []


def source_checks(plan: RunPlan, environment: Mapping[str, str]) -> Iterator[Callable[[], list[str]]]:
    """Yield the checks of the files, weights, and data of the recipe.

    They raise:
        NotFoundError: a file, a folder, the weights or the dataset does not exist.
        PrerequisiteError: the weights or the dataset are gated.
        ConfigError: `model.architecture` contradicts the weights' own configuration.
        DataError: a folder has no tokenizer or no chat template, or one of the first rows of a local file can't be used
            with the recipe's settings.
    """
    exported = plan.weights_to_export
    later = None if exported is None else Path(exported.folder)
    unseen = {key: path for key, path in local_paths(plan.recipe) if not path.exists() and path != later}
    for key, path in unseen.items():
        yield partial(_check_unseen, key, path, plan.cluster)
    environment, home = {**environment, **plan.cluster.environment}, Workspace(plan.workspace).hub_home
    if "model.weights" not in unseen and plan.recipe.model.weights != str(later):
        yield lambda: _as_list(check_weights(plan.recipe.model, environment, home))
    if plan.recipe.model.adapter is not None:
        yield partial(_check_adapter, plan.recipe)
    if not plan.is_data_prepared:
        tokenizer = find_tokenizer(plan.recipe.model, environment, home)
        if tokenizer is not None:
            yield partial(_check_tokenizer, plan.recipe, tokenizer)
        if not any(key.startswith("data.") for key in unseen):
            yield partial(check_examples, plan.recipe)
        yield lambda: _as_list(check_data(plan.recipe.data.source, environment, home))


def check_examples(recipe: RecipeSpec) -> list[str]:
    """Check that data files exist and are regular files, and that their first rows can be used.

    Raises:
        NotFoundError: a data file does not exist, or is a device.
        DataError: a row can't be used with the recipe's settings; with file and line.
    """
    for key, path in data_files(recipe):
        about = stat_path(key, path)
        if about is not None and not stat.S_ISREG(about.st_mode):
            raise NotFoundError(f"{key}: {path} is not a regular file", fix=f"give a file or a folder: {key}=PATH")
    try:
        rows = peek_rows(recipe.data)  # of all files, the validation file included
    except UnreachableError as error:
        return [f"{error.what}: neither its rows nor whether they changed can be checked here; the job will read them"]
    num_bad = 0
    for row, form in with_formats(recipe.data, rows):
        check_split(recipe.data, form)
        try:
            with errors_at(row):
                read_example(row.columns, recipe.data, form)
        except DataError:
            num_bad += 1
            if num_bad > recipe.data.skip_bad:
                raise
    return _unused_metrics(recipe, rows)


def _unused_metrics(recipe: RecipeSpec, rows: list[Row]) -> list[str]:
    """Return warnings about metrics of the recipe that have no score for any of these rows."""
    generation = recipe.evaluation.generation
    if not rows or generation is None or not generation.metrics:
        return []
    from ftkit.data.cases import untokenized_cases  # noqa: PLC0415 - only these recipes need it
    from ftkit.data.metrics import find_unmet_needs  # noqa: PLC0415

    pairs = with_formats(recipe.data, rows)
    cases = [case for row, form in pairs for case in untokenized_cases(row, recipe.data, form)]
    seen = f"the first {plural(len(rows), 'row')}"
    return [
        f"evaluation.generation.metrics: {name} has no score without {need}, which none of {seen} has"
        for name, need in find_unmet_needs(generation.metrics, cases).items()
    ]


def _check_adapter(recipe: RecipePlan) -> list[str]:
    from ftkit.launch.trained_model import check_adapter  # noqa: PLC0415 - few models are adapters

    check_adapter(recipe)
    return []


def _has_turns(data: DataSpec) -> bool:
    """Return whether the data has conversations, which need a chat template."""
    if not isinstance(data.format, AutoFormat):
        return data.format.kind != "text"
    try:
        return any(form.kind != "text" for _, form in read_available(data))
    except FtkitError:
        return False  # the check of the rows reports why


def _check_tokenizer(recipe: RecipePlan, folder: Path) -> list[str]:
    needs_template = recipe.data.chat_template != "model" or _has_turns(recipe.data)
    added = recipe.model.added_tokens
    check_tokenizer_folder(folder, recipe.data.chat_template, added_tokens=added, needs_template=needs_template)
    if needs_loading(folder) and find_spec("transformers"):
        from ftkit.data.tokenizers import load_tokenizer  # noqa: PLC0415 - seconds of imports, for few models

        own = recipe.model.tokenizer.model_copy(update={"source": str(folder)})
        load_tokenizer(recipe.model.model_copy(update={"tokenizer": own}), None)
    elif needs_template and find_spec("transformers"):
        _check_labels(recipe, folder)
    known, rows = read_vocabulary(folder), recipe.model.architecture.vocab_size
    num_tokens = 1 + max(known.ids.values(), default=-1) if known else 0
    return [_warn_of_vocabulary(folder, num_tokens, rows)] if num_tokens > rows else []


def _check_labels(recipe: RecipePlan, folder: Path) -> None:
    """Check that the chat template's trained parts can be shown to be the assistant's, for the first rows too.

    Raises:
        DataError: they can't; with file and line.
    """
    from ftkit.data import rendering  # noqa: PLC0415 - imports transformers, which plain text does not need
    from ftkit.data.limits import run_in_fork  # noqa: PLC0415 - only conversations need it
    from ftkit.data.tokenizers import load_listed_tokenizer  # noqa: PLC0415

    if recipe.data.train_on == "all" or not (folder / TOKENIZER_FILE).is_file():
        return
    configured = next((each for each in (folder, Path(recipe.model.weights)) if (each / CONFIG_FILE).is_file()), None)
    try:
        tokenizer = load_listed_tokenizer(folder, recipe.model, recipe.data.chat_template)
        ends = read_end_tokens(configured) if configured else []
    except Exception:  # noqa: BLE001 - damaged files raise anything; loading it with the model's class reports them
        return
    renderer = rendering.ChatRenderer.of(tokenizer, recipe.data.template_options, ends)
    if not renderer.end_tokens and configured is None:
        return  # where generation stops is known once the model is downloaded
    rows = list(read_available(recipe.data))
    run_in_fork(renderer, _check_first_rows, recipe.data, renderer, rows)


def _check_first_rows(data: DataSpec, renderer: ChatRenderer, rows: Sequence[tuple[Row, Format]]) -> None:
    renderer.find_unproven()
    num_bad = 0
    for row, form in rows:
        try:
            example = read_example(row.columns, data, form)
        except DataError:  # the check of the rows reports it
            continue
        try:
            with errors_at(row):
                if isinstance(example, Conversation):
                    renderer.renderings(example, data)
        except DataError:
            num_bad += 1
            if num_bad > data.skip_bad:
                raise


def _warn_of_vocabulary(folder: Path, num_tokens: int, rows: int) -> str:
    return (
        f"the tokenizer of {folder} has {num_tokens:,} tokens, the model's embedding {rows:,} rows: examples with "
        "higher token ids are refused; usually the tokenizer is another model's (model.tokenizer.source)"
    )


def _as_list(warning: str | None) -> list[str]:
    return [warning] if warning else []


def check_memory(plan: RunPlan, main_gib: float) -> list[str]:
    """Check that the run's processes fit the memory of this machine, or of the cluster's GPUs.

    Args:
        plan: the plan, with its predicted memory.
        main_gib: host memory of this machine, in GiB.

    Returns:
        A warning if they probably don't fit. For GPUs, this is in the plan's notes.

    Raises:
        MemoryExhaustedError: there is less than half of the predicted memory; suggests changes that would fit.
    """
    cluster, place, shape = plan.cluster, plan.placement, plan.recipe.model.architecture
    if place.device == "cuda":
        gpu = GPUS[cluster.gpu] if cluster.gpu else None
        num_processes, have, owner = 1, gpu.usable_gib if gpu else math.inf, f"a GPU ({cluster.gpu})"
    else:
        is_here = cluster.scheduler == "local"
        num_processes, have, owner = place.processes_per_node, main_gib if is_here else math.inf, "this machine"
    needed = num_processes * plan.memory.total
    what = f"the run is predicted to need about {needed:,.0f} GiB of memory, {owner} has {have:,.0f} GiB"
    if needed > CERTAINLY_TOO_LARGE * have and shape.is_measured:
        fitting = suggest_changes(plan.setup, cluster, have / num_processes)
        others = "use more GPUs or nodes, or a smaller model"
        raise MemoryExhaustedError(
            what, fix=f"would fit: {'; '.join(change.override for change in fitting)}" if fitting else others
        )
    return [f"{what}: expect it to run out of memory"] if needed > have and place.device == "cpu" else []


def _check_unseen(key: str, path: Path, cluster: ClusterProfile) -> list[str]:
    """Raise if a path should exist here but does not; return a warning if it may exist on the nodes only.

    That is a model on a file system that is not mounted here. Data must be here, so that its changes are noticed.
    """
    mounts = [Path(mount.partition(":")[0]) for mount in cluster.mounts]
    within = next((mount for mount in mounts if path.is_relative_to(mount)), path.parent)
    if cluster.scheduler == "slurm" and key.startswith("model.") and not within.exists():
        return [f"{key}: {path} is not visible from here, nor is {within}: the job will look for it on its nodes"]
    raise NotFoundError(
        f"{key}: {path} does not exist",
        meaning="the path is wrong, or its file system is not mounted here",
        fix=f"give the right path: {key}=PATH; a relative path is relative to the file that sets it",
    )


def _packages(plan: RunPlan) -> list[str]:
    """Return the packages that the trainer imports for a recipe, besides torch."""
    training = plan.recipe.training
    optional = {
        "peft": training.adapters is not None,
        "bitsandbytes": training.method == "qlora" or training.optimizer == "adamw8bit",
        "deepspeed": plan.engine.name == "zero3",
    }
    return ["transformers", *(name for name, is_needed in optional.items() if is_needed)]


def _check_packages(plan: JobPlan, *names: str) -> list[str]:
    """Check for torch and other packages in this Python environment, which a run without a container uses."""
    if plan.cluster.runtime != "none" or plan.cluster.scheduler != "local":
        return []
    if missing := [name for name in ("torch", *names) if find_spec(name) is None]:
        meaning = f"cluster '{plan.cluster.name}' has no container, so the run uses {plan.python}"
        raise missing_package_error(missing, meaning)
    return []


def host_memory_gib() -> float:
    """Return the host memory of this machine, in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
