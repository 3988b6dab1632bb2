"""Whether a model's weights can be had, asked before a GPU is held: a missing right must not cost a night.

Asked twice, where the job is submitted and by its first stage; of the standard library alone.
"""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import quote, urlsplit

from ftkit.errors import NotFoundError, PrerequisiteError
from ftkit.specs.load import is_path

if TYPE_CHECKING:
    from collections.abc import Mapping
    from email.message import Message

    from ftkit.specs.model import ModelSpec

DEFAULT_ENDPOINT = "https://huggingface.co"
TIMEOUT_SECONDS = 10
FALSE = ("", "0", "no", "off", "false")
CONFIG_FILE = "config.json"
WEIGHTS_INDEX = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"


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
    """
    if model.weights == "random":
        return None
    if is_path(model.weights):
        _check_folder(Path(model.weights))
        return None
    cache = _cache(environment, default_home)
    if not missing_files(_snapshot(cache, model)):
        return None
    offline = environment.get("HF_HUB_OFFLINE") or environment.get("TRANSFORMERS_OFFLINE") or ""
    if offline.lower() not in FALSE:
        return _not_cached(model, cache)
    return _ask_hub(model, environment)


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


# --- Folders and the cache -----------------------------------------------------------------------


def missing_files(folder: Path) -> list[str]:
    """Return what a folder lacks of a model in Hugging Face's layout."""
    missing = [] if (folder / CONFIG_FILE).is_file() else [CONFIG_FILE]
    if not (folder / WEIGHTS_INDEX).is_file():
        return missing if (folder / WEIGHTS_FILE).is_file() else [*missing, f"{WEIGHTS_FILE} or {WEIGHTS_INDEX}"]
    try:
        places = json.loads((folder / WEIGHTS_INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    except (ValueError, LookupError, TypeError, AttributeError):
        return [*missing, f"readable {WEIGHTS_INDEX}"]
    return missing + [file for file in sorted(set(places)) if not (folder / file).is_file()]


def read_model_type(folder: Path) -> str:
    """Return which architecture a model's configuration names, in transformers' words.

    Raises:
        NotFoundError: it can't be read, or names none.
    """
    path = folder / CONFIG_FILE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotFoundError(
            f"can't read {path}: {error}",
            meaning="a copy was interrupted, or the file was changed by hand",
            fix="copy or download it again: it is one JSON object",
        ) from error
    model_type = stored.get("model_type") if isinstance(stored, dict) else None
    if not isinstance(model_type, str):
        raise NotFoundError(
            f"{path} has no model_type",
            meaning="it is not a model's that transformers reads: those of other libraries are laid out otherwise",
            fix="convert the model to transformers' layout, or choose another with model.weights",
        )
    return model_type


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise NotFoundError(
            f"model.weights: there is no folder {folder} on {socket.gethostname()}",
            meaning="the path is wrong, or its file system is not mounted there",
            fix="give the right path: model.weights=PATH",
        )
    missing = missing_files(folder)
    if missing:
        raise NotFoundError(
            f"model.weights: {folder} has no {' and no '.join(missing)}",
            meaning="its weights are of another format, or a copy was interrupted",
            fix="give a folder in Hugging Face's layout, with weights as safetensors",
        )
    read_model_type(folder)


def _cache(environment: Mapping[str, str], default_home: Path) -> Path:
    named = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    return Path(named or Path(environment.get("HF_HOME") or default_home, "hub")).expanduser()


def _snapshot(cache: Path, model: ModelSpec) -> Path:
    """Return where a model's files are once they are downloaded."""
    folder, revision = cache / f"models--{model.weights.replace('/', '--')}", model.revision or "main"
    return folder / "snapshots" / (_read(folder / "refs" / revision) or revision)


def _not_cached(model: ModelSpec, cache: Path) -> str:
    what = f"model.weights: HF_HUB_OFFLINE is set, and not all files of '{model.weights}' are in {cache}"
    if not cache.is_dir():
        return f"{what}, which is not to be seen from here"
    raise NotFoundError(
        what,
        meaning="nothing is downloaded while HF_HUB_OFFLINE is set",
        fix=f"where there is a network: HF_HUB_CACHE={cache} hf download {model.weights}; or unset HF_HUB_OFFLINE",
    )


# --- The hub -------------------------------------------------------------------------------------


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
        return urllib.request.Request(newurl, headers=dict(req.headers), method="HEAD")  # noqa: S310 - the same host


def _ask_hub(model: ModelSpec, environment: Mapping[str, str]) -> str | None:
    """Ask for files, not about the model: of a gated one, everybody may know that it is there."""
    endpoint = (environment.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
    folder = f"{endpoint}/{quote(model.weights)}/resolve/{quote(model.revision or 'main', safe='')}"
    token = read_token(environment)
    try:
        refused = _head(f"{folder}/{CONFIG_FILE}", token)
        if refused:
            return _explain(model, refused, has_token=token is not None)
        answers = [_head(f"{folder}/{name}", token) for name in (WEIGHTS_FILE, WEIGHTS_INDEX)]
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        return f"can't ask the hub whether '{model.weights}' may be read ({reason}): the job will find out"
    if all(answer and answer.code == "EntryNotFound" for answer in answers):
        raise NotFoundError(
            f"model.weights: '{model.weights}' has no {WEIGHTS_FILE} and no {WEIGHTS_INDEX}",
            meaning="its weights are of another format, or these are adapters and not a model",
            fix="choose another model or revision; or convert the weights, and give model.weights the folder",
        )
    return None


def _head(address: str, token: str | None) -> _Refusal | None:
    """Ask whether a file may be read."""
    authorization = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(address, headers=authorization, method="HEAD")  # noqa: S310 - the user's setting
    try:
        with urllib.request.build_opener(_SameHost).open(request, timeout=TIMEOUT_SECONDS):
            return None
    except urllib.error.HTTPError as error:
        error.close()
        is_refusal = error.code >= HTTPStatus.BAD_REQUEST
        return _Refusal(error.code, error.headers.get("X-Error-Code", "")) if is_refusal else None


def _explain(model: ModelSpec, refused: _Refusal, *, has_token: bool) -> str:
    """Raise what an answer of the hub means; return a warning where it means nothing for the model."""
    if refused.code == "RevisionNotFound":
        raise NotFoundError(
            f"model.revision: '{model.weights}' has no revision '{model.revision or 'main'}'",
            fix="give a branch, a tag or a commit that the model's page lists",
        )
    if refused.code == "EntryNotFound":
        raise NotFoundError(
            f"model.weights: '{model.weights}' has no {CONFIG_FILE}",
            fix="give a model in transformers' layout: others can't be trained",
        )
    if refused.code == "GatedRepo" or refused.status == HTTPStatus.FORBIDDEN:
        raise PrerequisiteError(
            f"model.weights: '{model.weights}' is gated, and "
            + ("your token may not read it" if has_token else "there is no token"),
            meaning="its owner shares it with those who have accepted its licence",
            fix="accept the licence on the model's page; then set HF_TOKEN, or give --hf-token-file",
        )
    if refused.code == "RepoNotFound" or refused.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.NOT_FOUND}:
        raise NotFoundError(
            f"model.weights: the hub has no model '{model.weights}' that "
            + ("your token may read" if has_token else "can be read without a token"),
            meaning="the name is misspelt, the model is private, or the token is wrong",
            fix="check the name; set HF_TOKEN, or give --hf-token-file, for a private model",
        )
    return f"the hub answered {refused.status} when asked for '{model.weights}': the job will find out more"
