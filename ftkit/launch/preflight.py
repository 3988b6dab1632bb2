"""Checks before a job is submitted: files, data, weights, trackers, and memory."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ftkit.config.recipe import RecipePlan, RecipeSpec, check_access, check_packages
from ftkit.data.preferences import conversations_of
from ftkit.data.row_formats import check_format, read_example
from ftkit.data.rows import Row, errors_at
from ftkit.data.selection import peek_rows
from ftkit.data.tokenizer_files import check_tokenizer_folder, needs_loading, read_vocabulary
from ftkit.errors import (
    DataError,
    FtkitError,
    MemoryExhaustedError,
    NotFoundError,
    PrerequisiteError,
    UnreachableError,
    missing_package_error,
)
from ftkit.hub.client import TOKENIZER_FILE, find_tokenizer
from ftkit.hub.readiness import check_data, check_weights
from ftkit.launch.inputs import data_files, local_paths, read_available, stat_path, with_formats
from ftkit.launch.scheduler import warn_of_variables
from ftkit.launch.trained_model import check_adapter
from ftkit.models.folder import read_end_tokens
from ftkit.models.weight_files import CONFIG_FILE
from ftkit.paths import neighbor_of
from ftkit.planning.layout import Workspace
from ftkit.planning.plan import RunPlan
from ftkit.planning.suggestions import CERTAINLY_TOO_LARGE, check_host_memory, suggest_for
from ftkit.planning.training_setup import GPUS

if TYPE_CHECKING:
    from ftkit.config.cluster import ClusterProfile
    from ftkit.config.data import DataSpec
    from ftkit.data.conversations import Conversation
    from ftkit.data.rendering import ChatRenderer
    from ftkit.models.architecture import ModelPlan
    from ftkit.planning.plan import JobPlan, ScriptPlan


T = TypeVar("T")
Check = Callable[[], Iterable[str] | None]
"""A check raises an error, or returns warnings about properties that can't be checked from here."""


@dataclass(frozen=True)
class Findings:
    """The problems found, and warnings about properties that only the job can check."""

    errors: tuple[FtkitError, ...]
    warnings: tuple[str, ...]

    def raise_errors(self) -> None:
        """Raise the problem that was found, or an `ExceptionGroup` of several."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise ExceptionGroup("the run would fail", self.errors)


def run_checks(plan: RunPlan | ScriptPlan, environment: Mapping[str, str], *, is_preview: bool = False) -> Findings:
    """Check all requirements of a run except its image. All checks run, even if some fail.

    A preview only warns about missing access to trackers, since the run may be submitted elsewhere.
    """
    errors: list[FtkitError] = []
    warnings: list[str] = []
    checks: list[Check] = [partial(_check_packages, plan)]
    if isinstance(plan, RunPlan):
        checks = [*_training_checks(plan, environment, is_preview=is_preview)]
    if plan.cluster.scheduler == "slurm":
        checks.append(partial(warn_of_variables, environment))
    for check in checks:
        try:
            warnings += check() or ()
        except FtkitError as error:
            errors.append(error)
    return Findings(tuple(errors), tuple(warnings))


def _training_checks(plan: RunPlan, environment: Mapping[str, str], *, is_preview: bool) -> Iterator[Check]:
    yield partial(check_trackers, plan, environment, is_preview=is_preview)
    yield from source_checks(plan, environment)
    training = plan.recipe.training
    packages = {
        "transformers": True,
        "peft": training.adapters is not None,
        "bitsandbytes": training.method == "qlora" or training.optimizer == "adamw8bit",
        "deepspeed": plan.engine.name == "zero3",
    }
    yield partial(_check_packages, plan, *(name for name, is_needed in packages.items() if is_needed))
    if plan.recipe.sync is not None:
        yield partial(_check_sync, plan.recipe.sync)
    main_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    is_here = plan.cluster.scheduler == "local"
    yield partial(check_memory, plan, main_gib)
    node_gib = plan.cluster.memory_per_node_gib or (main_gib if is_here else None)
    yield partial(check_host_memory, plan, node_gib, "this machine" if is_here else f"a node of {plan.cluster.name}")
    with suppress(OSError):
        yield partial(check_precision, plan, Path("/proc/cpuinfo").read_text(encoding="utf-8"))


def _check_sync(destination: str) -> None:
    from ftkit.runs.sync import check_destination  # noqa: PLC0415 - fsspec is heavy, and few runs are copied

    check_destination(destination)


def check_trackers(plan: RunPlan, environment: Mapping[str, str], *, is_preview: bool = False) -> list[str]:
    """Check the trackers' keys, addresses and packages; only warn about those that the profile's `setup` may set."""
    cluster, tracking = plan.cluster, plan.recipe.tracking
    if cluster.runtime == "none" and cluster.scheduler == "local":
        check_packages(tracking)
    try:
        check_access(tracking, {**environment, **cluster.environment}, sees_home=cluster.runtime == "none")
    except PrerequisiteError as error:
        if is_preview:
            return [f"{error.what}: {error.fix}"]
        if not cluster.setup:
            raise
        return [f"{error.what}, unless the lines under 'setup' of cluster {cluster.name} set it"]
    return []


def source_checks(plan: RunPlan, environment: Mapping[str, str]) -> Iterator[Check]:
    """Yield the checks of the files, weights, and data of the recipe.

    They raise `NotFoundError` for missing inputs, `PrerequisiteError` for gated ones, `ConfigError` if the recipe
    contradicts the weights' configuration, and `DataError` for an unusable tokenizer or unusable first rows.
    """
    recipe, exported = plan.recipe, plan.weights_to_export
    later = None if exported is None else Path(exported.folder)
    unseen = {key: path for key, path in local_paths(recipe) if not path.exists() and path != later}
    for key, path in unseen.items():
        yield partial(_check_unseen, key, path, plan.cluster)
    environment, home = {**environment, **plan.cluster.environment}, Workspace(plan.workspace).hub_home
    if "model.weights" not in unseen and recipe.model.weights != str(later):
        yield lambda: filter(None, [check_weights(recipe.model, environment, home)])
    if recipe.model.adapter is not None:
        yield partial(check_adapter, recipe)
    if recipe.teacher is not None:
        yield partial(_check_teacher, recipe, recipe.teacher, environment, home)
    if not plan.data.is_prepared:
        if (tokenizer := find_tokenizer(recipe.model, environment, home)) is not None:
            yield partial(_check_tokenizer, recipe, tokenizer)
        if not any(key.startswith("data.") for key in unseen):
            yield partial(check_examples, recipe)
        yield lambda: filter(None, [check_data(recipe.data.source, environment, home)])


def check_examples(recipe: RecipeSpec) -> list[str]:
    """Check data files and their first rows; NotFoundError, or DataError with the file and line of a bad row."""
    for key, path in data_files(recipe):
        about = stat_path(key, path)
        if about is not None and not stat.S_ISREG(about.st_mode):
            raise NotFoundError(f"{key}: {path} is not a regular file", fix=f"give a file or a folder: {key}=PATH")
    try:
        rows = peek_rows(recipe.data)  # of all files, the validation file included
    except UnreachableError as error:
        return [f"{error.what}: neither its rows nor whether they changed can be checked here; the job will read them"]
    found = list(with_formats(recipe.data, rows))
    for _, form in found:
        check_format(recipe.data, form, recipe.training.objective)
    _check_rows(recipe.data, found, lambda row, form: read_example(row.columns, recipe.data, form))
    return []


def _check_rows(data: DataSpec, rows: Iterable[tuple[Row, T]], check: Callable[[Row, T], object]) -> None:
    """Check rows with their formats or conversations; at most `data.skip_bad` rows may be bad."""
    left = data.skip_bad
    for row, about in rows:
        try:
            with errors_at(row):
                check(row, about)
        except DataError:
            left -= 1
            if left < 0:
                raise


def _check_tokenizer(recipe: RecipePlan, folder: Path) -> list[str]:
    needs_template = recipe.data.chat_template != "model" or recipe.data.format.kind not in ("auto", "text")
    if recipe.data.format.kind == "auto":
        with suppress(FtkitError):  # the check of the rows reports it
            needs_template |= any(form.kind != "text" for _, form in read_available(recipe.data))
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
    if num_tokens <= rows:
        return []
    found = f"the tokenizer of {folder} has {num_tokens:,} tokens, the model's embedding {rows:,} rows"
    reason = "usually the tokenizer is another model's (model.tokenizer.source)"
    return [f"{found}: examples with higher token ids are refused; {reason}"]


def _check_teacher(recipe: RecipePlan, teacher: ModelPlan, environment: Mapping[str, str], home: Path) -> list[str]:
    """Check the teacher's weights, and its tokenizer if both tokenizers are here; otherwise the job compares them."""
    if teacher.trained is not None and not Path(teacher.weights).is_dir():
        fix = f"export it: ftkit export {teacher.trained.run} --step {teacher.trained.step} --to {teacher.weights}"
        raise NotFoundError(f"training.distill.teacher: {teacher.source} is not exported yet", fix=fix)
    warning = check_weights(teacher, environment, home)
    folders = [find_tokenizer(model, environment, home) for model in recipe.models]
    if find_spec("transformers") and all(folder and (folder / TOKENIZER_FILE).is_file() for folder in folders):
        from ftkit.data.tokenizers import check_same_tokenizer, load_listed_tokenizer  # noqa: PLC0415 - as above

        pairs = zip(folders, recipe.models, strict=True)
        own, other = (load_listed_tokenizer(folder, model, None) for folder, model in pairs if folder)
        check_same_tokenizer(own, other, teacher.weights)
    return [warning] if warning else []


def _check_labels(recipe: RecipePlan, folder: Path) -> None:
    """Check that the chat template's trained spans are provably the assistant's, also for the first rows.

    Pictures of these rows are opened too.
    """
    from ftkit.data import limits, pictures, rendering, tokenizers  # noqa: PLC0415 - transformers, which plain text does not need

    if recipe.data.train_on == "all" or not (folder / TOKENIZER_FILE).is_file():
        return
    folders = (folder, Path(recipe.model.weights))
    configured = next((each for each in folders if (each / CONFIG_FILE).is_file()), None)
    try:
        tokenizer = tokenizers.load_listed_tokenizer(folder, recipe.model, recipe.data.chat_template)
        ends = read_end_tokens(configured) if configured else []
    except Exception:  # noqa: BLE001 - damaged files raise anything; loading it with the model's class reports them
        return
    token = ""
    if recipe.data.pictures:
        model = recipe.model.model_copy(update={"weights": str(folder), "revision": None})
        with suppress(FtkitError):  # its class may need a package that only the job's image has
            token = pictures.PictureProcessor.of(model, tokenizer).token
    renderer = rendering.ChatRenderer.of(tokenizer, recipe.data.template_options, ends, token)
    if renderer.end_tokens or configured is not None:  # otherwise end tokens are known only after the download
        examples = []
        for row, form in read_available(recipe.data):
            with suppress(DataError):  # the check of the rows reports it
                examples.append((row, conversations_of(read_example(row.columns, recipe.data, form))))
        limits.run_in_fork(renderer, _check_examples, recipe.data, renderer, examples)

        def open_each(row: Row, found: tuple[Conversation, ...]) -> None:
            for source in _pictures_of(found):
                pictures.open_picture(source, row.folder)  # not kept: each may take 300 MB

        _check_rows(recipe.data, examples, open_each)


def _check_examples(
    data: DataSpec, renderer: ChatRenderer, examples: Iterable[tuple[Row, tuple[Conversation, ...]]]
) -> None:
    renderer.find_unproven()
    seen = [(row, found) for row, found in examples if renderer.picture_token or not any(_pictures_of(found))]
    _check_rows(data, seen, lambda _, found: [renderer.renderings(each, data) for each in found])


def _pictures_of(conversations: Iterable[Conversation]) -> Iterator[object]:
    return chain.from_iterable(turn.pictures for each in conversations for turn in each.messages)


def check_memory(plan: RunPlan, main_gib: float) -> list[str]:
    """Check that the run's processes fit the memory of this machine (`main_gib`), or of the cluster's GPUs.

    Returns a warning if they probably don't fit; for GPUs, the plan's notes have it. If there is less than half of the
    predicted memory, raises `MemoryExhaustedError` with changes that would fit.
    """
    cluster, place = plan.cluster, plan.placement
    if place.device == "cuda":
        num_processes, owner = 1, f"a GPU ({cluster.gpu})"
        have = GPUS[cluster.gpu].usable_gib if cluster.gpu else math.inf
    else:
        num_processes, owner = place.processes_per_node, "this machine"
        have = main_gib if cluster.scheduler == "local" else math.inf
    needed = num_processes * plan.memory.total
    what = f"the run is predicted to need about {needed:,.0f} GiB of memory, {owner} has {have:,.0f} GiB"
    if needed > CERTAINLY_TOO_LARGE * have and plan.recipe.model.architecture.is_measured:
        fitting = "; ".join(each.override for each in suggest_for(plan, have / num_processes))
        fix = f"would fit: {fitting}" if fitting else "use more GPUs or nodes, or a smaller model"
        raise MemoryExhaustedError(what, fix=fix)
    return [f"{what}: expect it to run out of memory"] if needed > have and place.device == "cpu" else []


def check_precision(plan: RunPlan, cpu_info: str) -> list[str]:
    """Warn of bf16 on CPUs of this machine that lack instructions for oneDNN's matmuls: AVX-512, or Arm's bf16.

    Full fine-tuning of a model of width 512 takes 11 times as long as fp32 with AVX2, and a third with AVX-512's bf16.
    """
    is_here = plan.cluster.scheduler == "local" and plan.placement.device == "cpu"
    is_bf16 = plan.recipe.training.compute_precision == "bf16"
    if is_here and is_bf16 and not re.search(r"^(flags|Features)\b.* (avx512bw|bf16)\b", cpu_info, re.MULTILINE):
        return ["this machine's CPUs lack instructions for bf16: training.precision=fp32 would be many times faster"]
    return []


def _check_unseen(key: str, path: Path, cluster: ClusterProfile) -> list[str]:
    """Raise an error if a path should exist here but does not; return a warning if it may exist only on the nodes.

    This applies to a model on a file system that is not mounted here. Data must be here, so that changes are detected.
    """
    mounts = [Path(mount.partition(":")[0]) for mount in cluster.mounts]
    within = next((mount for mount in mounts if path.is_relative_to(mount)), path.parent)
    if cluster.scheduler == "slurm" and key.startswith("model.") and not within.exists():
        return [f"{key}: {path} is not visible from here, nor is {within}: the job will look for it on its nodes"]
    raise NotFoundError(
        f"{key}: {path} does not exist",
        meaning="the path is wrong, or its file system is not mounted here",
        fix=f"{neighbor_of(path)}give the right path: {key}=PATH; a relative path is relative to the file that sets it",
    )


def _check_packages(plan: JobPlan, *names: str) -> None:
    """Check that this Python environment, which a run without a container uses, has torch and other packages."""
    if plan.cluster.runtime != "none" or plan.cluster.scheduler != "local":
        return
    if missing := [name for name in ("torch", *names) if find_spec(name) is None]:
        meaning = f"cluster '{plan.cluster.name}' has no container, so the run uses {plan.python}"
        raise missing_package_error(missing, meaning)
