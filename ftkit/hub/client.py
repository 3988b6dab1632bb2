"""The Hugging Face hub: models in its caches on this machine, and requests, whose errors become ftkit's.

huggingface_hub is imported only for requests, and for models that are in the cache.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ftkit.errors import NotFoundError, PrerequisiteError, one_line
from ftkit.models.folder import missing_files
from ftkit.models.weight_files import CONFIG_FILE
from ftkit.paths import is_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from huggingface_hub.errors import HfHubHTTPError

    from ftkit.models.architecture import ModelSpec


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


log = logging.getLogger(__name__)

DEFAULT_ENDPOINT = "https://huggingface.co"
TIMEOUT_SECONDS = 10
_FORBIDDEN = 403


@dataclass(frozen=True)
class Repository:
    """A repository in a recipe, with its key."""

    kind: Literal["model", "dataset"]
    key: str
    name: str
    revision: str | None


@dataclass(frozen=True)
class Answer:
    """The hub's answer about a repository: a warning if there is none, missing files, and the revision's commit."""

    warning: str | None
    missing: list[str]
    commit: str | None = None


def repository_of(model: ModelSpec) -> Repository:
    """Return the repository of a model's weights."""
    return Repository("model", "model.weights", model.weights, model.revision)


def ask(wanted: Repository, files: tuple[str, ...], environment: Mapping[str, str]) -> Answer:
    """Query the files of a repository: not the repository itself, whose metadata is public even if it is gated.

    Raises:
        NotFoundError: there is no such repository or revision.
        PrerequisiteError: it is gated, or access is denied.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url  # noqa: PLC0415

    token, endpoint = read_token(environment), endpoint_of(environment)
    missing: list[str] = []
    commit = None
    for file in files:
        url = hf_hub_url(wanted.name, file, repo_type=wanted.kind, revision=wanted.revision, endpoint=endpoint)
        log.debug("HEAD %s", url)
        try:
            found = get_hf_file_metadata(url, token=token or False, timeout=TIMEOUT_SECONDS)
            commit = commit or found.commit_hash
        except errors.EntryNotFoundError:
            missing.append(file)
        except errors.HfHubHTTPError as error:
            return Answer(_explain(wanted, error, has_token=token is not None), missing)
        except Exception as error:  # noqa: BLE001 - of the client's HTTP library
            reason = one_line(error)
            warning = f"can't ask the hub whether '{wanted.name}' may be read ({reason}): the job will check it"
            return Answer(warning, missing)
    return Answer(None, missing, commit)


def download_file(model: ModelSpec, name: str, environment: Mapping[str, str], default_home: Path) -> Path:
    """Download one file of a hub model into the cache; return its path. Raises the client's own errors."""
    from huggingface_hub import hf_hub_download  # noqa: PLC0415

    file = hf_hub_download(
        model.weights, name, revision=model.revision, endpoint=endpoint_of(environment),
        cache_dir=cache_folder(environment, default_home, *MODEL_CACHE), token=read_token(environment) or False,
        etag_timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    return Path(file)


def read_token(environment: Mapping[str, str]) -> str | None:
    """Return the hub's token: from the variable, or from the file of `hf auth login`.

    Raises:
        PrerequisiteError: the content can't be a token.
    """
    home = environment.get("HF_HOME") or Path(environment.get("HOME") or "~").expanduser() / ".cache" / "huggingface"
    path = Path(environment.get("HF_TOKEN_PATH") or Path(home, "token")).expanduser()
    places = {name: environment.get(name, "").strip() for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")}
    for place, token in (places | {str(path): _read(path)}).items():
        if token and not re.fullmatch(r"[!-~]+", token):  # the HTTP library's error would contain it
            raise PrerequisiteError(
                f"the content of {place} is not a hub token: a token is one word",
                fix="create one in the settings of your account on the hub",
            )
        if token:
            return token
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def endpoint_of(environment: Mapping[str, str]) -> str:
    """Return the address of the hub."""
    return (environment.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def _explain(wanted: Repository, refused: HfHubHTTPError, *, has_token: bool) -> str:
    """Raise the error for the hub's answer; return a warning if the answer is not about the repository."""
    from huggingface_hub import errors  # noqa: PLC0415

    response = getattr(refused, "response", None)
    status = 0 if response is None else int(response.status_code)
    if isinstance(refused, errors.RevisionNotFoundError):
        raise NotFoundError(
            f"{wanted.key.rpartition('.')[0]}.revision: '{wanted.name}' has no revision '{wanted.revision or 'main'}'",
            fix=f"give a branch, a tag or a commit that the {wanted.kind}'s page lists",
        )
    if isinstance(refused, errors.GatedRepoError) or status == _FORBIDDEN:
        raise PrerequisiteError(
            f"{wanted.key}: '{wanted.name}' is gated, and "
            + ("your token may not read it" if has_token else "there is no token"),
            meaning="its owner shares it with those who have accepted its license",
            fix=f"accept the license on the {wanted.kind}'s page; then set HF_TOKEN, or give --hf-token-file",
        )
    if isinstance(refused, errors.RepositoryNotFoundError) or status in {401, 404}:
        raise NotFoundError(
            f"{wanted.key}: the hub has no {wanted.kind} '{wanted.name}' that "
            + ("your token may read" if has_token else "can be read without a token"),
            meaning=f"the name is misspelled, the {wanted.kind} is private, or the token is wrong",
            fix=f"check the name; set HF_TOKEN, or give --hf-token-file, for a private {wanted.kind}",
        )
    return f"the hub answered {status} when asked for '{wanted.name}': the job will ask again"
