"""Whether weights and data can be had, asked before a GPU is held: a missing right must not cost a night.

Asked twice, where the job is submitted and by its first stage; of the standard library alone.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal
from urllib.parse import quote, urlsplit

from ftkit.config.model_config import find_contradictions, text_part
from ftkit.config.paths import is_path
from ftkit.config.sources import HubSource
from ftkit.errors import ConfigError, NotFoundError, PrerequisiteError, Problem
from ftkit.model_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    WEIGHTS_INDEX,
    check_folder,
    missing_files,
    read_model_config,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from email.message import Message

    from ftkit.config.model import ModelSpec
    from ftkit.config.sources import Source

DEFAULT_ENDPOINT = "https://huggingface.co"
TIMEOUT_SECONDS = 10
MAX_CONFIG_BYTES = 1 << 20
FALSE = ("", "0", "no", "off", "false")
CARD = "README.md"
"""Of a data set: what `datasets` asks for first, gated with the rest. One without it may be read as well."""


def check_weights(model: ModelSpec, environment: Mapping[str, str], default_home: Path) -> str | None:
    """Check that a model's weights are there and may be read.

    Args:
        model: its weights are a folder, a hub id, or random.
        environment: where the hub, its token and its cache are named, as Hugging Face's libraries read them.
        default_home: where the job keeps what it downloads, unless HF_HOME is set.

    Returns:
        A warning, if that can't be told from here.

    Raises:
        NotFoundError: there is no such folder, model or revision.
        PrerequisiteError: this token, or nobody without one, may read it.
        ConfigError: their configuration can be read, and `model.architecture` contradicts it.
    """
    if model.weights == "random":
        return None
    if is_path(model.weights):
        check_folder(Path(model.weights))
        _check_shape(model, read_model_config(Path(model.weights)))
        return None
    wanted = _Repository("model", "model.weights", model.weights, model.revision)
    cache = _cache(environment, default_home, "hub", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
    snapshot = _snapshot(cache, model)
    if (snapshot / CONFIG_FILE).is_file():
        _check_shape(model, read_model_config(snapshot))
    if not missing_files(snapshot):
        return None
    if offline := _offline(environment, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        return _not_cached(wanted, cache, offline, f"HF_HUB_CACHE={cache} hf download {model.weights}")
    warning, missing = _ask(wanted, (CONFIG_FILE, WEIGHTS_FILE, WEIGHTS_INDEX), environment)
    _check_complete(wanted, missing)
    if warning is None:
        _check_shape(model, _download_config(wanted, environment))
    return warning


def _check_shape(model: ModelSpec, config: Mapping[str, Any]) -> None:
    """Refuse a shape that would have no effect: what is trained is what the weights' configuration says."""
    found = find_contradictions(model.architecture, text_part(config))
    where, fix = f"{CONFIG_FILE} of {model.weights}", "Correct the recipe; what it leaves out has a default."
    if found:
        raise ConfigError([Problem(where, f"model.architecture.{key}", f"{each}.", fix) for key, each in found.items()])


def find_folder(model: ModelSpec, environment: Mapping[str, str], default_home: Path) -> Path | None:
    """Return the folder of a model's files that is on this machine: the one that is named, or the hub's cache.

    Arguments as `check_weights` has them. None: there is none, or no config.json in it.
    """
    if model.weights == "random":
        return None
    if is_path(model.weights):
        folder = Path(model.weights)
    else:
        folder = _snapshot(_cache(environment, default_home, "hub", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"), model)
    return folder if (folder / CONFIG_FILE).is_file() else None


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
    return _ask(wanted, (CARD,), environment)[0]


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


def _snapshot(cache: Path, model: ModelSpec) -> Path:
    """Return where a model's files are once they are downloaded."""
    folder, revision = cache / f"models--{model.weights.replace('/', '--')}", model.revision or "main"
    return folder / "snapshots" / (_read(folder / "refs" / revision) or revision)


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
    """What a recipe names of the hub, and under which key."""

    kind: Literal["model", "data set"]
    key: str
    name: str
    revision: str | None

    def address(self, endpoint: str) -> str:
        """Return where its files are."""
        folder = "" if self.kind == "model" else "datasets/"
        return f"{endpoint}/{folder}{quote(self.name)}/resolve/{quote(self.revision or 'main', safe='')}"


@dataclass(frozen=True)
class _Refusal:
    status: int
    code: str


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows a renamed model. A redirect to another host is an answer: the file may be read, and the token stays."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        del fp, code, msg, headers
        if urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            return None
        return urllib.request.Request(newurl, headers=dict(req.headers), method=req.get_method())  # noqa: S310 - the same host


def _ask(wanted: _Repository, files: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str | None, list[str]]:
    """Ask for files, not about the repository: of a gated one, everybody may know that it is there.

    Returns:
        A warning, if there is no answer; and the files that are not there.
    """
    folder = wanted.address((environment.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/"))
    token = read_token(environment)
    missing: list[str] = []
    for file in files:
        try:
            refused = _head(f"{folder}/{file}", token)
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            return f"can't ask the hub whether '{wanted.name}' may be read ({reason}): the job will find out", missing
        if refused and refused.code != "EntryNotFound":
            return _explain(wanted, refused, has_token=token is not None), missing
        missing += [file] if refused else []
    return None, missing


def _open(address: str, token: str | None, method: Literal["GET", "HEAD"]) -> HTTPResponse:
    authorization = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(address, headers=authorization, method=method)  # noqa: S310 - the user's setting
    answer: HTTPResponse = urllib.request.build_opener(_SameHost).open(request, timeout=TIMEOUT_SECONDS)
    return answer


def _head(address: str, token: str | None) -> _Refusal | None:
    """Ask whether a file may be read."""
    try:
        with _open(address, token, "HEAD"):
            return None
    except urllib.error.HTTPError as error:
        error.close()
        is_refusal = error.code >= HTTPStatus.BAD_REQUEST
        return _Refusal(error.code, error.headers.get("X-Error-Code", "")) if is_refusal else None


def _download_config(wanted: _Repository, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return a model's configuration, or nothing if that can't be had: the job will find out."""
    folder = wanted.address((environment.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/"))
    try:
        with _open(f"{folder}/{CONFIG_FILE}", read_token(environment), "GET") as answer:
            config = json.loads(answer.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError, HTTPException):
        return {}
    return config if isinstance(config, dict) else {}


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
            meaning="its owner shares it with those who have accepted its licence",
            fix=f"accept the licence on the {wanted.kind}'s page; then set HF_TOKEN, or give --hf-token-file",
        )
    if refused.code == "RepoNotFound" or refused.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.NOT_FOUND}:
        raise NotFoundError(
            f"{wanted.key}: the hub has no {wanted.kind} '{wanted.name}' that "
            + ("your token may read" if has_token else "can be read without a token"),
            meaning=f"the name is misspelt, the {wanted.kind} is private, or the token is wrong",
            fix=f"check the name; set HF_TOKEN, or give --hf-token-file, for a private {wanted.kind}",
        )
    return f"the hub answered {refused.status} when asked for '{wanted.name}': the job will find out more"
