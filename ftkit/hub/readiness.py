"""Check that weights and data can be read before a GPU is allocated, and download them.

This is checked twice: where the job is submitted, and by the job's first stage. Arguments as in `ftkit.hub.client`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftkit.config.data_sources import HubSource, Source
from ftkit.errors import NotFoundError, one_line
from ftkit.hub.client import (
    MODEL_CACHE,
    Repository,
    ask,
    cache_folder,
    download_file,
    find_cached,
    find_folder,
    offline_variable,
    read_token,
    repository_of,
)
from ftkit.models.config_json import check_shape
from ftkit.models.folder import SMALL_FILES, check_folder, missing_files, read_model_config
from ftkit.models.weight_files import CONFIG_FILE, UNREADABLE, WEIGHTS_FILE, WEIGHTS_INDEX, check_tensors, weight_files
from ftkit.paths import is_path

if TYPE_CHECKING:
    from ftkit.models.architecture import ModelSpec

JsonFile = dict[str, Any]
CARD = "README.md"
"""File of a dataset that `datasets` requests first, gated like the others. A readable dataset may lack it."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def check_weights(model: ModelSpec, environment: Mapping[str, str], default_home: Path) -> str | None:
    """Check that a model's weights exist and may be read, and that `model.architecture` and config.json fit them.

    Returns a warning if this can't be checked here, or if the files have unused decoder layers. Raises NotFoundError
    without such a folder, model or revision, or if the files contradict their config.json; PrerequisiteError if access
    is denied; ConfigError if `model.architecture` contradicts it.
    """
    if model.weights == "random":
        return None
    folder = find_folder(model, environment, default_home)
    if is_path(model.weights):
        folder = Path(model.weights)
        check_folder(folder)
    if folder is not None:
        config = read_model_config(folder)
        check_shape(model.architecture_of_weights, config, model.weights)
        if is_path(model.weights) or not missing_files(folder):
            return check_tensors(model.architecture_of_weights, config, folder)
    wanted = repository_of(model)
    if offline := offline_variable(environment):
        cache = cache_folder(environment, default_home, *MODEL_CACHE)
        return _require_cached(wanted, cache, offline, f"HF_HUB_CACHE={cache} hf download {model.weights}")
    answer = ask(wanted, (CONFIG_FILE, WEIGHTS_FILE, WEIGHTS_INDEX), environment)
    _check_complete(wanted, answer.missing)
    if answer.warning is None and (fetched := fetch_config(model, environment, default_home)):
        check_shape(model.architecture_of_weights, fetched, model.weights)
    return answer.warning


def _check_complete(wanted: Repository, missing: list[str]) -> None:
    """Refuse a model without transformers' layout, or without safetensors."""
    if CONFIG_FILE in missing or {WEIGHTS_FILE, WEIGHTS_INDEX} <= {*missing}:
        raise NotFoundError(
            f"{wanted.key}: '{wanted.name}' has no {' and no '.join(missing)}",
            meaning="ftkit trains models in transformers' layout with safetensors; these files have another format, "
            "such as GGUF, or are adapters",
            fix="choose another model or revision; or convert the weights, and give model.weights the folder",
            name="no-model-files",
        )


def download_weights(
    model: ModelSpec, environment: Mapping[str, str], default_home: Path, *, local_files_only: bool = False
) -> Path:
    """Download a model's missing files into the hub's cache; return their folder.

    Many repositories have the weights a second time, in other layouts (`consolidated.safetensors`, `original/`): only
    the files that the index lists are downloaded.
    """
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415

    cache, token = cache_folder(environment, default_home, *MODEL_CACHE), read_token(environment) or False
    download = partial(
        snapshot_download, model.weights, local_files_only=local_files_only, cache_dir=cache, token=token
    )
    try:
        folder = Path(download(allow_patterns=[*SMALL_FILES, WEIGHTS_FILE], revision=model.revision))
        try:
            files = weight_files(folder)
        except UNREADABLE:  # a damaged index, which `check_folder` refuses
            return folder
        # The same commit, even if the branch has moved.
        return Path(download(allow_patterns=[*files], revision=folder.name))
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        message = getattr(error, "server_message", None) or one_line(error)
        raise NotFoundError(
            f"can't download '{model.weights}': {message}",
            meaning="the name is wrong, the model is gated and HF_TOKEN may not read it, or the hub is out of reach",
            fix="accept the model's license on the hub and set HF_TOKEN; or give model.weights a local folder",
        ) from error


def find_commit(model: ModelSpec, environment: Mapping[str, str], default_home: Path) -> str | None:
    """Return the commit of a model's revision, from the cache or the hub; None if unknown.

    Raises as `check_weights` does.
    """
    if model.weights == "random" or is_path(model.weights) or _COMMIT.fullmatch(model.revision or ""):
        return model.revision
    if (folder := find_folder(model, environment, default_home)) is not None and _COMMIT.fullmatch(folder.name):
        return folder.name
    return None if offline_variable(environment) else ask(repository_of(model), (CONFIG_FILE,), environment).commit


def fetch_config(model: ModelSpec, environment: Mapping[str, str], default_home: Path) -> JsonFile | None:
    """Return the configuration of a hub model, downloaded into the cache; None if the hub does not respond."""
    if offline_variable(environment):
        return None
    answer = ask(repository_of(model), (CONFIG_FILE,), environment)  # without a network, a download tries five times
    _check_complete(repository_of(model), answer.missing)
    try:
        path = None if answer.warning else download_file(model, CONFIG_FILE, environment, default_home)
        return None if path is None else read_model_config(path.parent)
    except Exception:  # noqa: BLE001 - errors of the client, of its HTTP library, of the file system
        return None


def fetch_files(
    model: ModelSpec, names: Sequence[str], environment: Mapping[str, str], default_home: Path
) -> Path | None:
    """Return the folder of the hub's cache with some of a model's files; download them if the first is missing.

    Returns None if the model lacks the first file, or the hub does not respond. Raises as `check_weights` does.
    """
    found = find_cached(model.weights, names[0], model.revision, environment, default_home)
    if found is not None or offline_variable(environment):
        return found
    answer = ask(repository_of(model), tuple(names), environment)
    if answer.warning is not None or names[0] in answer.missing:
        return None
    try:
        files = [download_file(model, name, environment, default_home) for name in names if name not in answer.missing]
    except Exception:  # noqa: BLE001 - errors of the client, of its HTTP library, of the file system
        return None
    return files[0].parent


def check_data(source: Source, environment: Mapping[str, str], default_home: Path) -> str | None:
    """Check that a hub dataset exists and may be read, like `check_weights`; other sources pass."""
    if not isinstance(source, HubSource) or is_path(source.dataset):
        return None
    wanted = Repository("dataset", "data.source.dataset", source.dataset, source.revision)
    cache = cache_folder(environment, default_home, "datasets", "HF_DATASETS_CACHE")
    if any(_cache_name(folder.name) == _cache_name(source.dataset) for folder in cache.glob("*")):
        return None
    if offline := offline_variable(environment, "HF_DATASETS_OFFLINE"):
        load = f"import datasets; datasets.load_dataset({source.dataset!r}, {source.subset!r})"
        return _require_cached(wanted, cache, offline, f'HF_DATASETS_CACHE={cache} python -c "{load}"')
    return ask(wanted, (CARD,), environment).warning


def _cache_name(name: str) -> str:
    """Return the name of a dataset's folder in the cache of `datasets`: `org___my_data` for `org/MyData`."""
    return re.sub("[/_]", "", name).lower()


def _require_cached(wanted: Repository, cache: Path, offline: str, command: str) -> str:
    what = f"{wanted.key}: {offline} is set, and not all files of '{wanted.name}' are in {cache}"
    if not cache.is_dir():
        return f"{what}, which is not visible from here"
    raise NotFoundError(
        what,
        meaning=f"nothing is downloaded while {offline} is set",
        fix=f"where there is a network: {command}; or unset {offline}",
        name="offline",
    )
