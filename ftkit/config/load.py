"""Find and read recipes, cluster profiles and images."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from pydantic import BaseModel

from ftkit import assets
from ftkit.config.cluster import ClusterProfile
from ftkit.config.context import list_images, list_names, search_folders
from ftkit.config.data_sources import (
    FilesSource,
    GeneratedSource,
    HubSource,
    MixtureSource,
    SingleSource,
    expand_source,
    is_inline_template,
)
from ftkit.config.image import BASE_LOCK_NAME, ImageSpec, read_base_lock
from ftkit.config.image_reference import parse_image, parse_reference
from ftkit.config.layers import Layers
from ftkit.config.problems import validate
from ftkit.config.recipe import RecipeSpec
from ftkit.config.task import TaskFile
from ftkit.config.yaml_files import parse_override, read_yaml
from ftkit.errors import ConfigError, NotFoundError, Problem
from ftkit.files import read_small
from ftkit.models.config_json import read_shape
from ftkit.paths import absolute_path, is_address, is_file, is_path, path_problem
from ftkit.spec import RUN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ftkit.config.context import Context
    from ftkit.config.data import DataSpec

SpecT = TypeVar("SpecT", bound=BaseModel)

_LENGTHS: Final = (("training", "max_steps"), ("training", "num_epochs"))
"""Keys that replace each other, as in Hugging Face's TrainingArguments: the last one wins."""


@dataclass(frozen=True)
class Loaded(Generic[SpecT]):
    """A spec, and the origin of each of its values."""

    spec: SpecT
    layers: Layers


def read_recipe(name: str, ctx: Context, overrides: Iterable[str] = ()) -> Loaded[RecipeSpec]:
    """Read a recipe by name or path, apply `key.path=value` overrides, and validate the result.

    Raises:
        NotFoundError: there is no such recipe.
        ConfigError: with every problem found.
    """
    path = _find("recipe", name, ctx)
    typed, names_model = Layers(), False
    for override in overrides:
        one = _expand_short_forms(parse_override(override))
        names_model = names_model or isinstance(one.values.get("model"), str)
        typed = _with_weights(one).over(_with_weights(typed))
    below = _read_extended("recipe", path, ctx)
    layers = _merge_over(typed, below.without(("model",)) if names_model else below)
    return Loaded(_with_absolute_paths(validate(RecipeSpec, layers), layers), layers)


def override_recipe(recipe: Mapping[str, Any], overrides: Iterable[str]) -> Loaded[RecipeSpec]:
    """Apply `key.path=value` overrides to the values of a recipe that was read before, and validate the result.

    Raises:
        ConfigError: with every problem found.
    """
    typed = Layers()
    for override in overrides:
        typed = _model_over(parse_override(override), typed)
    layers = _merge_over(typed, Layers(dict(recipe)))
    return Loaded(validate(RecipeSpec, layers), layers)


def load_recipe(name: str, ctx: Context, overrides: Iterable[str] = ()) -> RecipeSpec:
    """Read a recipe as `read_recipe` does."""
    return read_recipe(name, ctx, overrides).spec


def read_cluster(name: str, ctx: Context) -> Loaded[ClusterProfile]:
    """Read a cluster profile by name or path. Raises as `read_recipe` does."""
    layers = _read_extended("cluster", _find("cluster", name, ctx), ctx)
    return Loaded(validate(ClusterProfile, layers), layers)


def load_cluster(name: str, ctx: Context) -> ClusterProfile:
    """Read a cluster profile as `read_cluster` does."""
    return read_cluster(name, ctx).spec


@dataclass(frozen=True)
class ImageDefinition:
    """An image's definition and its files.

    Args:
        spec: the definition; its base has the digest that a lock records, if the definition gives none.
        base_file: the file that sets the base.
        base_locks: files that may record the base's digest: next to that file, and in the user's configuration.
        is_base_recorded: whether the base's digest is from one of these.
        lock_file: the lock of the packages, next to the file that lists them.
    """

    spec: ImageSpec
    base_file: Path
    base_locks: tuple[Path, ...]
    is_base_recorded: bool
    lock_file: Path


def load_image(reference: str, ctx: Context) -> ImageSpec:
    """Read the definition of `NAME:TAG`. Raises as `load_recipe` does."""
    return find_image(reference, ctx).spec


def find_image(reference: str, ctx: Context) -> ImageDefinition:
    """Read the definition of `NAME:TAG`, with its files. Raises as `load_recipe` does."""
    name, _, tag = reference.partition(":")
    _check_can_be_a_file("image", reference)
    for folder in search_folders("image", ctx):
        path = folder / name / tag / "image.yaml"
        if tag and is_file(path):
            layers = _read_extended("image", path, ctx)
            files = [Path(layers.origin((key,)).rpartition(":")[0] or path) for key in ("base", "packages")]
            return _with_recorded_base(validate(ImageSpec, layers), files[0], files[1].with_suffix(".lock"), ctx)
    known = list_images(ctx)
    raise NotFoundError(
        f"image '{reference}' is not defined",
        meaning=f"defined images: {', '.join(known)}",
        fix=_closest(
            reference, known, "give one of these; your own images are folders containers/NAME/TAG/ in the project"
        ),
    )


def _with_recorded_base(spec: ImageSpec, base_file: Path, lock_file: Path, ctx: Context) -> ImageDefinition:
    """Set the base's digest from a lock; the one next to the definition takes precedence over the user's."""
    base_locks = (base_file.with_name(BASE_LOCK_NAME), ctx.user / BASE_LOCK_NAME)
    base = parse_reference(spec.base.reference, str(base_file), "base.reference")
    digest = spec.base.digest or base.digest
    recorded = None
    if digest is None:
        found = (read_base_lock(path).get(base.tagged) for path in base_locks)
        recorded = next((one for one in found if one), None)
    pinned = spec.base.model_copy(update={"digest": digest or recorded})
    spec = spec.model_copy(update={"base": pinned})
    return ImageDefinition(spec, base_file, base_locks, recorded is not None, lock_file)


def _find(kind: str, name: str, ctx: Context) -> Path:
    _check_can_be_a_file(kind, name)
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = absolute_path(name, Path.cwd(), key=kind)
        if is_file(path):
            return path
        if os.path.exists(path):  # noqa: PTH110 - False for impossible paths
            raise NotFoundError(
                f"{path} is not a regular file",
                meaning=f"it is a folder, pipe or device; paths in a {kind} are relative to its file's folder",
                fix=f"write the {kind} into a file, and give its path",
            )
        raise NotFoundError(f"file {path} not found", fix=f"give the path of a {kind} file, or a {kind}'s name")
    for folder in search_folders(kind, ctx):
        if is_file(folder / f"{name}.yaml"):
            return folder / f"{name}.yaml"
    known = list_names(kind, ctx)
    raise NotFoundError(
        f"{kind} '{name}' not found",
        meaning=f"known: {', '.join(known)}",
        fix=_closest(name, known, f"give a name from this list, or the path of a {kind} file"),
    )


def _check_can_be_a_file(kind: str, name: str) -> None:
    problem = path_problem(f"{name}.yaml")
    if problem:
        raise NotFoundError(f"there is no such {kind}: {problem}", fix=f"give a {kind}'s name")


def _closest(word: str, known: list[str], otherwise: str) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean '{close[0]}'?" if close else otherwise


def _read_extended(kind: str, path: Path, ctx: Context, seen: tuple[Path, ...] = ()) -> Layers:
    """Read a file, on top of the one in its `extends`."""
    layers = _expand_short_forms(read_yaml(path))
    parent = layers.values.get("extends")
    if parent is None:
        return layers
    if not isinstance(parent, str):
        raise ConfigError(
            [Problem(layers.origin(("extends",)), "extends", f"must be a {kind}'s name, got {parent!r}.")]
        )
    parent_path = _find(kind, parent, ctx)
    if parent_path in (*seen, path):
        raise ConfigError(
            [Problem(layers.origin(("extends",)), "extends", f"'{parent}' extends itself, directly or through others.")]
        )
    return _merge_over(layers.without(("extends",)), _read_extended(kind, parent_path, ctx, (*seen, path)))


def _merge_over(above: Layers, below: Layers) -> Layers:
    """Merge one layer into another. `max_steps` or `num_epochs` of the upper one replaces either of the lower."""
    given = [path for path in _LENGTHS if above.value(path) is not None]
    if len(given) == 1:
        (other,) = set(_LENGTHS) - set(given)
        below = below.without(other)
    return _model_over(above, below)


def _model_over(above: Layers, below: Layers) -> Layers:
    """Merge one layer into another. The short form of a model in the upper one replaces the lower's whole model."""
    if isinstance(above.values.get("model"), str):
        below = below.without(("model",))
    return _with_weights(above).over(_with_weights(below))


def _with_weights(layers: Layers) -> Layers:
    """Expand the short form of a model, which is its weights alone."""
    weights = layers.values.get("model")
    if not isinstance(weights, str):
        return layers
    origins = layers.origins | {("model", "weights"): layers.origin(("model",))}
    return Layers({**layers.values, "model": {"weights": weights}}, origins)


def _expand_short_forms(layers: Layers) -> Layers:
    """Expand short forms, so that other layers can change parts of them."""
    data = layers.values.get("data")
    if isinstance(data, dict) and "source" in data:
        values = {**layers.values, "data": {**data, "source": expand_source(data["source"])}}
        layers = Layers(values, layers.origins)
    return _with_architecture(layers)


def _with_architecture(layers: Layers) -> Layers:
    """Replace the name of a shipped architecture with its fields."""
    model = layers.values.get("model")
    name = model.get("architecture") if isinstance(model, dict) else None
    if not isinstance(name, str):
        return layers
    where = layers.origin(("model", "architecture"))
    path = assets.ARCHITECTURES / f"{name}.yaml"
    if not is_file(path):
        known = sorted(file.stem for file in assets.ARCHITECTURES.glob("*.yaml"))
        fix = _closest(name, known, f"Known: {', '.join(known)}; or give the fields themselves.")
        raise ConfigError([Problem(where, "model.architecture", f"there is no architecture '{name}'.", fix)])
    # Dump all fields, so that none of an architecture in a lower layer remains.
    shape = read_shape(read_shipped(path)[0], name).model_dump()
    origins = {("model", "architecture", key): str(path) for key in shape}
    named = {**layers.values, "model": {**layers.values["model"], "architecture": shape}}
    return Layers(named, layers.origins | origins)


def _with_absolute_paths(recipe: RecipeSpec, layers: Layers) -> RecipeSpec:
    """Make paths absolute: relative ones are relative to their file, or to the current folder."""

    def absolute(value: str, *key: str) -> str:
        return str(absolute_path(value, layers.folder(key), layers.origin(key), ".".join(key)))

    def hub_id_or_absolute(value: str, *key: str) -> str:
        if is_path(value):
            return absolute(value, *key)
        if (layers.folder(key) / value).exists():
            kind = "folder" if (layers.folder(key) / value).is_dir() else "file"
            message = f"'{value}' could be a hub id, or the {kind} in {layers.folder(key)}."
            fix = f"For the {kind} write ./{value}; for the hub id, rename the {kind}."
            raise ConfigError([Problem(layers.origin(key), ".".join(key), message, fix)])
        return value

    image, model, source = recipe.image, recipe.model, recipe.data.source
    if image is not None:
        image = str(parse_image(image, layers.folder(("image",)), layers.origin(("image",)), "image"))
    if model.weights != "random" and not model.weights.startswith(RUN):
        model = model.model_copy(update={"weights": hub_id_or_absolute(model.weights, "model", "weights")})
    if is_path(model.tokenizer.source):
        tokenizer = {"source": absolute(model.tokenizer.source, "model", "tokenizer", "source")}
        model = model.model_copy(update={"tokenizer": model.tokenizer.model_copy(update=tokenizer)})
    validation = recipe.data.validation
    if validation and validation.file and not is_address(validation.file):
        file = {"file": absolute(validation.file, "data", "validation", "file")}
        validation = validation.model_copy(update=file)
    if isinstance(source, MixtureSource):
        sources = tuple(_with_absolute_source(each, absolute, hub_id_or_absolute) for each in source.sources)
        source = source.model_copy(update={"sources": sources})
    else:
        source = _with_absolute_source(source, absolute, hub_id_or_absolute)
    read = {"chat_template": _template_text(recipe, layers), "task": _read_task(recipe.data, layers)}
    data = recipe.data.model_copy(update={"source": source, "validation": validation, **read})
    return recipe.model_copy(update={"image": image, "model": model, "data": data})


def _template_text(recipe: RecipeSpec, layers: Layers) -> str:
    """Return the text of a chat template's file. It becomes part of the plan, so that no node needs the file."""
    template, key = recipe.data.chat_template, ("data", "chat_template")
    if not is_path(template):
        return template
    path = absolute_path(template, layers.folder(key), layers.origin(key), ".".join(key))
    text = _read_text(path, "chat template", layers, key)
    if not is_inline_template(text):
        message = f"{path} is not a chat template: it has no {{{{ or {{%."
        raise ConfigError([Problem(layers.origin(key), ".".join(key), message)])
    return text


def _read_task(data: DataSpec, layers: Layers) -> TaskFile | None:
    """Return the task with the text of its file, which becomes part of the plan. The file is not run."""
    key = ("data", "task")
    if data.task is None:
        return None
    path = absolute_path(data.task.file, layers.folder(key), layers.origin(key), "data.task")
    task = TaskFile(file=str(path), text=_read_text(path, "task", layers, key))
    options = tuple(data.source.options) if isinstance(data.source, GeneratedSource) else ()
    problems = [
        Problem(layers.origin(key), "data.task", f"{path}:{line}: {text}")
        for line, text in task.find_problems(data.task_functions, options)
    ]
    if problems:
        raise ConfigError(problems)
    return task


def _read_text(path: Path, name: str, layers: Layers, key: tuple[str, ...]) -> str:
    try:
        return read_small(path).decode()
    except OSError as error:
        problem = f"can't read the {name} {path}: {error.strerror}."
    except UnicodeDecodeError:
        problem = f"the {name} {path} is not UTF-8."
    raise ConfigError([Problem(layers.origin(key), ".".join(key), problem)])


def _with_absolute_source(
    source: SingleSource, absolute: Callable[..., str], hub_id_or_absolute: Callable[..., str]
) -> SingleSource:
    key, change = ("data", "source"), {}
    if isinstance(source, FilesSource):
        files = {name: getattr(source, name) for name in ("train", "heldout")}
        change = {name: absolute(file, *key, name) for name, file in files.items() if file and not is_address(file)}
    elif isinstance(source, HubSource):
        change = {"dataset": hub_id_or_absolute(source.dataset, *key, "dataset")}
    return source.model_copy(update=change)


# --- Configurations of published models, so that their recipes are planned without a network ---------


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
    config = dict(read_yaml(path).values)
    return config, tuple(config.pop("models", ()))
