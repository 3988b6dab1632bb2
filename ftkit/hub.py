"""Whether weights and data can be had, checked before a GPU is held: a missing right must not cost a night.

Checked twice, where the job is submitted and by its first stage. Requests and cache are huggingface_hub's, which is
imported when it is needed: that takes a third of a second.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ftkit.config.model_config import find_contradictions
from ftkit.config.paths import is_path
from ftkit.config.sources import HubSource
from ftkit.errors import ConfigError, NotFoundError, PrerequisiteError, Problem, one_line
from ftkit.model_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    WEIGHTS_INDEX,
    check_folder,
    missing_files,
    read_model_config,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftkit.config.model import ModelSpec
    from ftkit.config.sources import Source

DEFAULT_ENDPOINT = "https://huggingface.co"
TIMEOUT_SECONDS = 10
FALSE = ("", "0", "no", "off", "false")
CARD = "README.md"
"""Of a data set: what `datasets` asks for first, gated with the rest. One without it may be read as well."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHE_OF_MODELS = ("hub", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")


def check_weights(model: ModelSpec, environment: Mapping[str, str], default_home: Path) -> str | None:
    """Check that a model's weights are there and may be read.

    Args:
        model: its weights are a folder, a hub id, or random.
        environment: the variables that Hugging Face's libraries read: the hub's address, its token, its cache.
        default_home: where the job keeps what it downloads, unless HF_HOME is set.

    Returns:
        A warning, if that can't be told from here.

    Raises:
        NotFoundError: there is no such folder, model or revision.
        PrerequisiteError: the model is gated, or there is no right to it.
        ConfigError: their configuration can be read, and `model.architecture` contradicts it.
    """
    if model.weights == "random":
        return None
    if is_path(model.weights):
        check_folder(Path(model.weights))
        _check_shape(model, read_model_config(Path(model.weights)))
        return None
    wanted = _repository(model)
    cache = _cache(environment, default_home, *_CACHE_OF_MODELS)
    folder = find_folder(model, environment, default_home)
    if folder is not None:
        _check_shape(model, read_model_config(folder))
        if not missing_files(folder):
            return None
    if offline := _offline(environment, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        return _not_cached(wanted, cache, offline, f"HF_HUB_CACHE={cache} hf download {model.weights}")
    answer = _ask(wanted, (CONFIG_FILE, WEIGHTS_FILE, WEIGHTS_INDEX), environment)
    _check_complete(wanted, answer.missing)
    if answer.warning is None and (fetched := fetch_config(model, environment, default_home)):
        _check_shape(model, fetched)
    return answer.warning


def _check_shape(model: ModelSpec, config: Mapping[str, Any]) -> None:
    """Refuse a shape that would have no effect: what is trained is what the weights' configuration says."""
    found = find_contradictions(model.architecture_of_weights, config)
    where, fix = f"{CONFIG_FILE} of {model.weights}", "Correct the recipe, or leave it out."
    if found:
        raise ConfigError([Problem(where, f"model.architecture.{key}", f"{each}.", fix) for key, each in found.items()])


def find_folder(model: ModelSpec, environment: Mapping[str, str], default_home: Path) -> Path | None:
    """Return the folder of a model's files that is on this machine: the given one, or the hub's cache.

    Arguments as `check_weights` has them. None: there is none.
    """
    if model.weights == "random":
        return None
    if is_path(model.weights):
        folder = Path(model.weights)
        return folder if (folder / CONFIG_FILE).is_file() else None
    cache = _cache(environment, default_home, *_CACHE_OF_MODELS)
    if not (cache / f"models--{model.weights.replace('/', '--')}").is_dir():  # as for most models: nothing to import
        return None
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    found = try_to_load_from_cache(model.weights, CONFIG_FILE, cache_dir=cache, revision=model.revision)
    return Path(found).parent if isinstance(found, str) else None


def is_fetched(model: ModelSpec, environment: Mapping[str, str], default_home: Path) -> bool:
    """Whether a model's weights need no download. Arguments as `check_weights` has them."""
    if model.weights == "random" or is_path(model.weights):
        return True
    folder = find_folder(model, environment, default_home)
    return folder is not None and not missing_files(folder)


def download_weights(
    model: ModelSpec, environment: Mapping[str, str], default_home: Path, *, local_files_only: bool = False
) -> Path:
    """Bring a model's files into the hub's cache, if they are not there; return their folder.

    Arguments as `check_weights` has them.

    Raises:
        NotFoundError: there is no such hub model, or this token may not read it.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415

    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja"]
    try:
        folder = snapshot_download(
            model.weights,
            revision=model.revision,
            allow_patterns=patterns,
            local_files_only=local_files_only,
            cache_dir=_cache(environment, default_home, *_CACHE_OF_MODELS),
            token=read_token(environment),
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise NotFoundError(
            f"can't download '{model.weights}': {one_line(error)}",
            meaning="the name is wrong, the model is gated and HF_TOKEN may not read it, or the hub is out of reach",
            fix="accept the model's license on the hub and set HF_TOKEN; or give model.weights a local folder",
        ) from error
    return Path(folder)


def find_commit(model: ModelSpec, environment: Mapping[str, str], default_home: Path) -> str | None:
    """Return the commit that a model's revision is: in the cache, or by asking the hub; None: neither tells.

    Arguments as `check_weights` has them; raises as it does.
    """
    if model.weights == "random" or is_path(model.weights) or _COMMIT.fullmatch(model.revision or ""):
        return model.revision
    if (folder := find_folder(model, environment, default_home)) is not None and _COMMIT.fullmatch(folder.name):
        return folder.name
    if _offline(environment, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        return None
    return _ask(_repository(model), (CONFIG_FILE,), environment).commit


def fetch_config(model: ModelSpec, environment: Mapping[str, str], default_home: Path) -> dict[str, Any] | None:
    """Return the configuration of a model of the hub by one small request, which leaves it in the cache.

    Arguments as `check_weights` has them. None: the hub can't be asked from here, or has nothing sensible.

    Raises:
        NotFoundError: there is no such model or revision, or it has no configuration.
        PrerequisiteError: the model is gated, or there is no right to it.
    """
    if _offline(environment, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        return None
    wanted = _repository(model)
    answer = _ask(wanted, (CONFIG_FILE,), environment)  # a download would try five times where there is no network
    if answer.warning is not None:
        return None
    _check_complete(wanted, answer.missing)
    try:
        return read_model_config(_download(model, CONFIG_FILE, environment, default_home).parent)
    except Exception:  # noqa: BLE001 - of the client, of the HTTP library below it, of the file system
        return None


def fetch_files(
    model: ModelSpec, names: Sequence[str], environment: Mapping[str, str], default_home: Path
) -> Path | None:
    """Return the folder of the hub's cache that has some of a model's files, downloaded if the first is not there.

    Arguments as `check_weights` has them; raises as it does. None: the first is lacking, or the hub can't be asked.
    """
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    cache = _cache(environment, default_home, *_CACHE_OF_MODELS)
    found = try_to_load_from_cache(model.weights, names[0], cache_dir=cache, revision=model.revision)
    if isinstance(found, str):
        return Path(found).parent
    if _offline(environment, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        return None
    answer = _ask(_repository(model), tuple(names), environment)
    if answer.warning is not None or names[0] in answer.missing:
        return None
    try:
        files = [_download(model, name, environment, default_home) for name in names if name not in answer.missing]
    except Exception:  # noqa: BLE001 - of the client, of the HTTP library below it, of the file system
        return None
    return files[0].parent


def _download(model: ModelSpec, name: str, environment: Mapping[str, str], default_home: Path) -> Path:
    from huggingface_hub import hf_hub_download  # noqa: PLC0415

    file = hf_hub_download(
        model.weights, name, revision=model.revision, endpoint=_endpoint(environment),
        cache_dir=_cache(environment, default_home, *_CACHE_OF_MODELS), token=read_token(environment) or False,
        etag_timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    return Path(file)


def check_data(source: Source, environment: Mapping[str, str], default_home: Path) -> str | None:
    """Check that a data set of the hub is there and may be read, as `check_weights` does; others have no hub."""
    if not isinstance(source, HubSource) or is_path(source.dataset):
        return None
    wanted = _Repository("data set", "data.source.dataset", source.dataset, source.revision)
    cache = _cache(environment, default_home, "datasets", "HF_DATASETS_CACHE")
    if any(_bare(folder.name) == _bare(source.dataset) for folder in cache.glob("*")):
        return None
    if offline := _offline(environment, "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        load = f"import datasets; datasets.load_dataset({source.dataset!r}, {source.subset!r})"
        return _not_cached(wanted, cache, offline, f'HF_DATASETS_CACHE={cache} python -c "{load}"')
    return _ask(wanted, (CARD,), environment).warning


def read_token(environment: Mapping[str, str]) -> str | None:
    """Return the hub's token: the variable's, or that of the file in which `hf auth login` leaves it.

    Raises:
        PrerequisiteError: what is there can't be a token.
    """
    home = environment.get("HF_HOME") or Path(environment.get("HOME") or "~").expanduser() / ".cache" / "huggingface"
    path = Path(environment.get("HF_TOKEN_PATH") or Path(home, "token")).expanduser()
    places = {name: environment.get(name, "").strip() for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")}
    for place, token in (places | {str(path): _read(path)}).items():
        if token and not re.fullmatch(r"[!-~]+", token):  # the HTTP library would show it in its complaint
            raise PrerequisiteError(
                f"what {place} holds is not a token of the hub: a token is one word",
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


# --- The caches ----------------------------------------------------------------------------------


def _cache(environment: Mapping[str, str], default_home: Path, name: str, *variables: str) -> Path:
    named = next((environment[variable] for variable in variables if environment.get(variable)), None)
    return Path(named or Path(environment.get("HF_HOME") or default_home, name)).expanduser()


def _bare(name: str) -> str:
    """Return what `datasets` leaves of a name in its cache, where `org/MyData` is `org___my_data`."""
    return re.sub("[/_]", "", name).lower()


def _offline(environment: Mapping[str, str], *variables: str) -> str | None:
    """Return the variable that says that the hub is not to be asked."""
    return next((name for name in variables if environment.get(name, "").lower() not in FALSE), None)


def _not_cached(wanted: _Repository, cache: Path, offline: str, command: str) -> str:
    what = f"{wanted.key}: {offline} is set, and not all files of '{wanted.name}' are in {cache}"
    if not cache.is_dir():
        return f"{what}, which is not to be seen from here"
    raise NotFoundError(
        what,
        meaning=f"nothing is downloaded while {offline} is set",
        fix=f"where there is a network: {command}; or unset {offline}",
    )


# --- The hub -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Repository:
    """What a recipe asks for of the hub, and under which key."""

    kind: Literal["model", "data set"]
    key: str
    name: str
    revision: str | None


def _repository(model: ModelSpec) -> _Repository:
    return _Repository("model", "model.weights", model.weights, model.revision)


@dataclass(frozen=True)
class _Refusal:
    """How the hub refuses: its own code, or the HTTP status alone."""

    status: int
    code: str


@dataclass(frozen=True)
class _Answer:
    """What the hub says of a repository: a warning if it can't be asked, the files it lacks, the revision's commit."""

    warning: str | None
    missing: list[str]
    commit: str | None = None


def _endpoint(environment: Mapping[str, str]) -> str:
    return (environment.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def _ask(wanted: _Repository, files: tuple[str, ...], environment: Mapping[str, str]) -> _Answer:
    """Ask for files, not about the repository: of a gated one, everybody may know that it is there."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url  # noqa: PLC0415

    token, endpoint = read_token(environment), _endpoint(environment)
    kind = "model" if wanted.kind == "model" else "dataset"
    missing: list[str] = []
    commit = None
    for file in files:
        url = hf_hub_url(wanted.name, file, repo_type=kind, revision=wanted.revision, endpoint=endpoint)
        try:
            found = get_hf_file_metadata(url, token=token or False, timeout=TIMEOUT_SECONDS)
            commit = commit or found.commit_hash
        except Exception as error:  # noqa: BLE001 - of the client, and of the HTTP library below it
            refused = _read_refusal(error)
            if refused is None:
                reason = str(error).partition("\n")[0] or type(error).__name__
                warning = f"can't ask the hub whether '{wanted.name}' may be read ({reason}): the job will find out"
                return _Answer(warning, missing)
            if refused.code != "EntryNotFound":
                return _Answer(_explain(wanted, refused, has_token=token is not None), missing)
            missing.append(file)
    return _Answer(None, missing, commit)


def _read_refusal(error: Exception) -> _Refusal | None:
    """Return how the hub refused; None: the error is another."""
    from huggingface_hub import errors  # noqa: PLC0415

    codes: dict[str, type[Exception]] = {
        "GatedRepo": errors.GatedRepoError, "RepoNotFound": errors.RepositoryNotFoundError,
        "RevisionNotFound": errors.RevisionNotFoundError, "EntryNotFound": errors.EntryNotFoundError,
    }  # fmt: skip
    if not isinstance(error, errors.HfHubHTTPError):
        return None
    code = next((name for name, kind in codes.items() if isinstance(error, kind)), "")
    response = getattr(error, "response", None)
    return _Refusal(0 if response is None else int(response.status_code), code)


def _check_complete(wanted: _Repository, missing: list[str]) -> None:
    """Refuse a model that is not laid out as transformers does it, or has no safetensors."""
    if CONFIG_FILE in missing:
        raise NotFoundError(
            f"{wanted.key}: '{wanted.name}' has no {CONFIG_FILE}",
            fix="give a model in transformers' layout: others can't be trained",
        )
    if {WEIGHTS_FILE, WEIGHTS_INDEX} <= {*missing}:
        raise NotFoundError(
            f"{wanted.key}: '{wanted.name}' has no {WEIGHTS_FILE} and no {WEIGHTS_INDEX}",
            meaning="its weights are of another format, or these are adapters and not a model",
            fix="choose another model or revision; or convert the weights, and give model.weights the folder",
        )


def _explain(wanted: _Repository, refused: _Refusal, *, has_token: bool) -> str:
    """Raise what an answer of the hub means; return a warning where it means nothing for the repository."""
    if refused.code == "RevisionNotFound":
        raise NotFoundError(
            f"{wanted.key.rpartition('.')[0]}.revision: '{wanted.name}' has no revision '{wanted.revision or 'main'}'",
            fix=f"give a branch, a tag or a commit that the {wanted.kind}'s page lists",
        )
    if refused.code == "GatedRepo" or refused.status == HTTPStatus.FORBIDDEN:
        raise PrerequisiteError(
            f"{wanted.key}: '{wanted.name}' is gated, and "
            + ("your token may not read it" if has_token else "there is no token"),
            meaning="its owner shares it with those who have accepted its license",
            fix=f"accept the license on the {wanted.kind}'s page; then set HF_TOKEN, or give --hf-token-file",
        )
    if refused.code == "RepoNotFound" or refused.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.NOT_FOUND}:
        raise NotFoundError(
            f"{wanted.key}: the hub has no {wanted.kind} '{wanted.name}' that "
            + ("your token may read" if has_token else "can be read without a token"),
            meaning=f"the name is misspelt, the {wanted.kind} is private, or the token is wrong",
            fix=f"check the name; set HF_TOKEN, or give --hf-token-file, for a private {wanted.kind}",
        )
    return f"the hub answered {refused.status} when asked for '{wanted.name}': the job will find out more"
