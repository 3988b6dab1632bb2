"""Query the hub with huggingface_hub, and convert its error responses to ftkit's errors."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ftkit.errors import NotFoundError, PrerequisiteError, one_line
from ftkit.hub.cache import MODEL_CACHE, cache_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftkit.config.model import ModelSpec


log = logging.getLogger(__name__)

DEFAULT_ENDPOINT = "https://huggingface.co"
TIMEOUT_SECONDS = 10


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
    from huggingface_hub import get_hf_file_metadata, hf_hub_url  # noqa: PLC0415

    token, endpoint = read_token(environment), endpoint_of(environment)
    missing: list[str] = []
    commit = None
    for file in files:
        url = hf_hub_url(wanted.name, file, repo_type=wanted.kind, revision=wanted.revision, endpoint=endpoint)
        log.debug("HEAD %s", url)
        try:
            found = get_hf_file_metadata(url, token=token or False, timeout=TIMEOUT_SECONDS)
            commit = commit or found.commit_hash
        except Exception as error:  # noqa: BLE001 - errors of the client, and of its HTTP library
            refused = _read_refusal(error)
            if refused is None:
                reason = one_line(error)
                warning = f"can't ask the hub whether '{wanted.name}' may be read ({reason}): the job will check it"
                return Answer(warning, missing)
            if refused.code != "EntryNotFound":
                return Answer(_explain(wanted, refused, has_token=token is not None), missing)
            missing.append(file)
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


@dataclass(frozen=True)
class _Refusal:
    """The hub's refusal: its error code, or the HTTP status."""

    status: int
    code: str


def _read_refusal(error: Exception) -> _Refusal | None:
    """Return the hub's refusal; None for other errors."""
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


def _explain(wanted: Repository, refused: _Refusal, *, has_token: bool) -> str:
    """Raise the error for the hub's answer; return a warning if the answer is not about the repository."""
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
            meaning=f"the name is misspelled, the {wanted.kind} is private, or the token is wrong",
            fix=f"check the name; set HF_TOKEN, or give --hf-token-file, for a private {wanted.kind}",
        )
    return f"the hub answered {refused.status} when asked for '{wanted.name}': the job will ask again"
