"""Find models in Hugging Face's caches on this machine, without a network.

huggingface_hub is imported only for models that are in the cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.config.paths import is_path
from ftkit.model_folder import CONFIG_FILE, missing_files

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftkit.config.model import ModelSpec


TOKENIZER_FILE = "tokenizer.json"
FALSE = ("", "0", "no", "off", "false")
MODEL_CACHE = ("hub", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")


def find_folder(model: ModelSpec, environment: Mapping[str, str], default_home: Path) -> Path | None:
    """Return the folder on this machine with a model's files: its own, or one in the hub's cache.

    Args:
        model: its weights are a folder, a hub id, or random.
        environment: the variables that Hugging Face's libraries read: the hub's address, its token, its cache.
        default_home: the job's cache, unless HF_HOME is set.

    Returns:
        None if there is no such folder.
    """
    if model.weights == "random":
        return None
    if is_path(model.weights):
        folder = Path(model.weights)
        return folder if (folder / CONFIG_FILE).is_file() else None
    return _cached(model.weights, CONFIG_FILE, model.revision, environment, default_home)


def find_tokenizer(model: ModelSpec, environment: Mapping[str, str], default_home: Path) -> Path | None:
    """Return the folder on this machine with a model's tokenizer. Arguments as in `find_folder`.

    Returns:
        None if there is none, or if the tokenizer.json of a hub model was not downloaded.
    """
    is_own = model.tokenizer.source == "model"
    source = model.weights if is_own else model.tokenizer.source
    if is_path(source):
        return Path(source) if Path(source).is_dir() else None
    if source == "random" or model.tokenizer.vocab_size is not None:  # trained on the data
        return None
    return _cached(source, TOKENIZER_FILE, model.revision if is_own else None, environment, default_home)


def _cached(
    name: str, file: str, revision: str | None, environment: Mapping[str, str], default_home: Path
) -> Path | None:
    """Return the folder of the hub's cache with a model's file."""
    cache = cache_folder(environment, default_home, *MODEL_CACHE)
    if not (cache / f"models--{name.replace('/', '--')}").is_dir():  # true for most models, and saves the import
        return None
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    found = try_to_load_from_cache(name, file, cache_dir=cache, revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def is_fetched(model: ModelSpec, environment: Mapping[str, str], default_home: Path) -> bool:
    """Return whether a model's weights need no download. Arguments as in `find_folder`."""
    if model.weights == "random" or is_path(model.weights):
        return True
    folder = find_folder(model, environment, default_home)
    return folder is not None and not missing_files(folder)


def cache_folder(environment: Mapping[str, str], default_home: Path, name: str, *variables: str) -> Path:
    """Return the folder of the first set variable; else `name` below HF_HOME or `default_home`."""
    named = next((environment[variable] for variable in variables if environment.get(variable)), None)
    return Path(named or Path(environment.get("HF_HOME") or default_home, name)).expanduser()


def offline_variable(environment: Mapping[str, str], *variables: str) -> str | None:
    """Return the first of the variables that forbids requests to the hub; None if none does."""
    return next((name for name in variables if environment.get(name, "").lower() not in FALSE), None)
