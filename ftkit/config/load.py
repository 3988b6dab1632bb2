"""Find and read recipes, cluster profiles and images."""

from __future__ import annotations

import copy
import os
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import BaseModel

from ftkit import assets
from ftkit.config.cluster import ClusterProfile
from ftkit.config.context import Context, list_images, list_names, search_folders
from ftkit.config.data_sources import DATA_FILE, GeneratedSource, expand_source, is_inline_template
from ftkit.config.image import BASE_LOCK_NAME, ImageSpec, read_base_lock
from ftkit.config.image_reference import parse_image, parse_reference
from ftkit.config.layers import KeyPath, Layers
from ftkit.config.problems import validate
from ftkit.config.recipe import MAIN_KEYS, RecipeSpec
from ftkit.config.yaml_files import parse_override, read_yaml
from ftkit.errors import ConfigError, NotFoundError, Problem, closest
from ftkit.files import read_small
from ftkit.models.config_json import read_shape
from ftkit.paths import absolute_path, is_address, is_file, is_path, neighbor_of, path_problem
from ftkit.spec import RUN

SpecT = TypeVar("SpecT", bound=BaseModel)


class Loaded(NamedTuple, Generic[SpecT]):
    """A spec, and the origin of each of its values."""

    spec: SpecT
    layers: Layers


def read_recipe(name: str, ctx: Context, overrides: Iterable[str] = ()) -> Loaded[RecipeSpec]:
    """Read a recipe by name or path, apply `key.path=value` overrides, and validate the result.

    Raises NotFoundError: there is no such recipe; ConfigError with every problem found.
    """
    path = _find("recipe", name, ctx)
    layers = _override(_read_extended("recipe", path, ctx), overrides)
    layers.values.setdefault("name", path.stem)
    validate(RecipeSpec, layers)  # paths are resolved only if all values have the right types
    spec = validate(RecipeSpec, _resolve_files(layers))
    if spec.data.task is not None:
        options = tuple(spec.data.source.options) if isinstance(spec.data.source, GeneratedSource) else ()
        found = spec.data.task.find_problems(spec.data.task_functions, options)
        where, file = layers.origin(("data", "task")), spec.data.task.file
        if problems := [Problem(where, "data.task", f"{file}:{line}: {text}") for line, text in found]:
            raise ConfigError(problems)
    return Loaded(spec, layers)


def override_recipe(recipe: Mapping[str, object], overrides: Iterable[str]) -> Loaded[RecipeSpec]:
    """Apply overrides to the values of an already read recipe, and validate the result like `read_recipe`."""
    layers = _override(Layers(dict(recipe)), overrides)
    return Loaded(validate(RecipeSpec, layers), layers)


def load_recipe(name: str, ctx: Context, overrides: Iterable[str] = ()) -> RecipeSpec:
    return read_recipe(name, ctx, overrides).spec


def read_cluster(name: str, ctx: Context) -> Loaded[ClusterProfile]:
    """Read a cluster profile by name or path. Raises as `read_recipe` does."""
    layers = _read_extended("cluster", _find("cluster", name, ctx), ctx)
    return Loaded(validate(ClusterProfile, layers), layers)


def load_cluster(name: str, ctx: Context) -> ClusterProfile:
    return read_cluster(name, ctx).spec


class ImageDefinition(NamedTuple):
    spec: ImageSpec
    """The definition. If it gives no digest of its base, the base has the digest that a lock records."""
    base_file: Path  # the file that sets the base
    base_locks: tuple[Path, ...]
    """Files that may record the base's digest: next to `base_file`, which comes first, and in the user's folder."""
    is_base_recorded: bool  # whether the base's digest is from one of these
    lock_file: Path  # the lock of the packages, next to the file that lists them


def load_image(reference: str, ctx: Context) -> ImageSpec:
    return find_image(reference, ctx).spec


def find_image(reference: str, ctx: Context) -> ImageDefinition:
    """Read the definition of `NAME:TAG`, with its files. Raises as `load_recipe` does."""
    name, _, tag = reference.partition(":")
    _check_can_be_a_file("image", reference, ctx.project)
    paths = [folder / name / tag / "image.yaml" for folder in search_folders("image", ctx)]
    path = next((each for each in paths if tag and is_file(each)), None)
    if path is None:
        known = list_images(ctx)
        advice = "give one of these; your own images are folders containers/NAME/TAG/ in the project"
        raise NotFoundError(
            f"image '{reference}' is not defined",
            meaning=f"defined images: {', '.join(known)}",
            fix=_closest(reference, known, advice),
        )
    layers = _read_extended("image", path, ctx)
    spec = validate(ImageSpec, layers)
    if spec.reference != reference:
        what = f"are '{spec.reference}', but the folder's are '{reference}'."
        raise ConfigError([Problem(str(path), "name, tag", what, "Correct them, or rename the folder.")])
    packages = "extra_packages" if spec.extra_packages else "packages"
    base_file, packages_file = (Path(layers.origin((key,)).rpartition(":")[0] or path) for key in ("base", packages))
    base_locks = (base_file.with_name(BASE_LOCK_NAME), ctx.user / BASE_LOCK_NAME)
    base = parse_reference(spec.base.reference, str(base_file), "base.reference")
    digest, recorded = spec.base.digest or base.digest, None
    if digest is None:
        found = (read_base_lock(each).get(base.tagged) for each in base_locks)
        recorded = next((each for each in found if each), None)
    spec = spec.model_copy(update={"base": spec.base.model_copy(update={"digest": digest or recorded})})
    return ImageDefinition(spec, base_file, base_locks, recorded is not None, packages_file.with_suffix(".lock"))


def _find(kind: str, name: str, ctx: Context, extended_by: Path | None = None) -> Path:
    """Find a file by name or path; a relative path is relative to the file that extends it, or the current folder."""
    base = extended_by.parent if extended_by else Path.cwd()
    _check_can_be_a_file(kind, name, base)
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = absolute_path(name, base, key=kind)
        if is_file(path):
            return path
        if os.path.exists(path):  # noqa: PTH110 - False for impossible paths
            raise NotFoundError(
                f"{path} is not a regular file",
                meaning=f"it is a folder, pipe or device; paths in a {kind} are relative to its file's folder",
                fix=f"write the {kind} into a file, and give its path",
            )
        raise NotFoundError(
            f"file {path} not found",
            meaning=f"{extended_by} extends '{name}', relative to its own folder" if extended_by else "",
            fix=f"{neighbor_of(path)}give the path of a {kind} file, or a {kind}'s name",
        )
    for folder in search_folders(kind, ctx):
        if is_file(folder / f"{name}.yaml"):
            return folder / f"{name}.yaml"
    known = list_names(kind, ctx)
    raise NotFoundError(
        f"{kind} '{name}' not found",
        meaning=f"known: {', '.join(known)}",
        fix=_closest(name, known, f"give a name from this list, or the path of a {kind} file"),
    )


def _check_can_be_a_file(kind: str, name: str, folder: Path) -> None:
    if problem := path_problem(f"{name}.yaml"):
        raise NotFoundError(f"there is no such {kind}: {problem}", fix=f"give a {kind}'s name")
    if name.endswith(".py"):
        raise NotFoundError(f"{name} is not a {kind}: it is a Python program", fix=f"ftkit run --script {name}")
    if kind == "recipe" and _is_data(name, folder):
        raise NotFoundError(
            f"{name} is not a recipe: it is data",
            meaning="a recipe names a model and its data",
            fix=f"write one: ftkit init MODEL {shlex.quote(name)}",
        )


def _is_data(name: str, folder: Path) -> bool:
    """Return whether a file exists and has a suffix of data; a recipe may be an object in JSON."""
    if not DATA_FILE.search(name) or not is_file(path := absolute_path(name, folder)):
        return False
    if path.suffix.lower() != ".json" or "/" not in name:
        return True
    with suppress(OSError), path.open("rb") as file:
        return file.read(64).lstrip().startswith(b"[")
    return False


def _closest(word: str, known: list[str], otherwise: str) -> str:
    close = closest(word, known)
    return f"did you mean '{close}'?" if close else otherwise


# --- Files and overrides as layers -------------------------------------------------------------------


def _read_extended(kind: str, path: Path, ctx: Context, seen: tuple[Path, ...] = ()) -> Layers:
    """Read a file, and merge it over the file in its `extends`."""
    layers = _expand_short_forms(read_yaml(path))
    parent = layers.values.get("extends")
    if parent is None:
        return layers
    if not isinstance(parent, str):
        raise _error(layers, ("extends",), f"must be a {kind}'s name, got {parent!r}.")
    parent_path = _find(kind, parent, ctx, path)
    if parent_path in (*seen, path):
        raise _error(layers, ("extends",), f"'{parent}' extends itself, directly or through others.")
    return _merge_over(layers.without(("extends",)), _read_extended(kind, parent_path, ctx, (*seen, path)))


def _override(below: Layers, overrides: Iterable[str]) -> Layers:
    """Merge `key.path=value` overrides into a recipe; `model=WEIGHTS` replaces only the recipe's model."""
    typed = Layers()
    for override in overrides:
        one = _expand_short_forms(parse_override(override))
        below = _without_replaced(below, one)
        typed = _with_main_keys(one).over(typed)
    return _merge_over(typed, below)


def _merge_over(above: Layers, below: Layers) -> Layers:
    """Merge one layer over another.

    `max_steps` or `num_epochs` in the upper layer replaces either in the lower, as in Hugging Face's TrainingArguments.
    The short form of a model or of data replaces the whole section of the lower layer.
    """
    lengths = {("training", "max_steps"), ("training", "num_epochs")}
    given = {path for path in lengths if above.value(path) is not None}
    if len(given) == 1:
        (other,) = lengths - given
        below = below.without(other)
    return _with_main_keys(above).over(_with_main_keys(_without_replaced(below, above)))


def _without_replaced(below: Layers, above: Layers) -> Layers:
    for section in MAIN_KEYS:
        if isinstance(above.values.get(section), str):
            below = below.without((section,))
    return below


def _with_main_keys(layers: Layers) -> Layers:
    """Expand the short form of a model (its weights alone) or of data (its source alone)."""
    values, origins = dict(layers.values), dict(layers.origins)
    for section, key in MAIN_KEYS.items():
        if isinstance(value := values.get(section), str):
            values[section] = {key: expand_source(value) if section == "data" else value}
            origins[section, key] = layers.origin((section,))
    return Layers(values, origins)


def _expand_short_forms(layers: Layers) -> Layers:
    """Expand a source, and the name of a shipped architecture to its fields, so that overrides can change parts."""
    values, origins = dict(layers.values), layers.origins
    data, model = values.get("data"), values.get("model")
    if isinstance(data, dict) and "source" in data:
        values["data"] = {**data, "source": expand_source(data["source"])}
    name = model.get("architecture") if isinstance(model, dict) else None
    if isinstance(model, dict) and isinstance(name, str):
        path = assets.ARCHITECTURES / f"{name}.yaml"
        if not is_file(path):
            known = sorted(file.stem for file in assets.ARCHITECTURES.glob("*.yaml"))
            fix = _closest(name, known, f"Known: {', '.join(known)}; or give the fields themselves.")
            raise _error(layers, ("model", "architecture"), f"there is no architecture '{name}'.", fix)
        # Dump all fields, so that no field of an architecture in a lower layer remains.
        shape = read_shape(read_shipped(path)[0], name).model_dump()
        values["model"] = {**model, "architecture": shape}
        origins = origins | {("model", "architecture", key): str(path) for key in shape}
    return Layers(values, origins)


# --- Files that a recipe mentions --------------------------------------------------------------------


def _resolve_files(layers: Layers) -> Layers:
    """Make a valid recipe's paths absolute, and read the files that become part of the plan, so no node needs them.

    Relative paths are relative to their file, or to the current folder.
    """
    values = copy.deepcopy(_with_main_keys(layers).values)
    model, data, source = values["model"], values["data"], values["data"]["source"]
    places = [(model, ("model", "weights")), (model.get("tokenizer"), ("model", "tokenizer", "source"))]
    places.append((data.get("validation"), ("data", "validation", "file")))
    places.append(((values.get("training") or {}).get("distill"), ("training", "distill", "teacher")))
    for each in source["sources"] if source["kind"] == "mixture" else [source]:
        places += [(each, ("data", "source", name)) for name in ("train", "heldout", "dataset")]
    for mapping, key in places:
        if mapping and mapping.get(key[-1]) is not None:
            mapping[key[-1]] = _absolute(mapping[key[-1]], key, layers)
    if (image := values.get("image")) is not None:
        values["image"] = str(parse_image(image, layers.folder(("image",)), layers.origin(("image",)), "image"))
    if is_path(template := data.get("chat_template", "")):
        key = ("data", "chat_template")
        path, data["chat_template"] = _read_text(template, "chat template", layers, key)
        if not is_inline_template(data["chat_template"]):
            raise _error(layers, key, f"{path} is not a chat template: it has no {{{{ or {{%.")
    if task := data.get("task"):
        path, text = _read_text(task if isinstance(task, str) else task["file"], "task", layers, ("data", "task"))
        data["task"] = {"file": str(path), "text": text}
    return Layers(values, layers.origins)


def _absolute(value: str, key: KeyPath, layers: Layers) -> str:
    can_be_hub_id = key[-1] in ("weights", "dataset", "source", "teacher")
    if is_address(value) or (can_be_hub_id and not is_path(value)):
        there = layers.folder(key) / value
        if key[-1] != "source" and value != "random" and not value.startswith(RUN) and there.exists():
            kind = "folder" if there.is_dir() else "file"
            fix = f"For the {kind} write ./{value}; for the hub id, rename the {kind}."
            raise _error(layers, key, f"'{value}' could be a hub id, or the {kind} in {layers.folder(key)}.", fix)
        return value
    return str(absolute_path(value, layers.folder(key), layers.origin(key), ".".join(key)))


def _read_text(file: str, name: str, layers: Layers, key: KeyPath) -> tuple[Path, str]:
    path = absolute_path(file, layers.folder(key), layers.origin(key), ".".join(key))
    try:
        return path, read_small(path).decode()
    except OSError as error:
        problem = f"can't read the {name} {path}: {error.strerror}."
    except UnicodeDecodeError:
        problem = f"the {name} {path} is not UTF-8."
    raise _error(layers, key, problem)


def _error(layers: Layers, key: KeyPath, message: str, fix: str = "") -> ConfigError:
    return ConfigError([Problem(layers.origin(key), ".".join(key), message, fix)])


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
