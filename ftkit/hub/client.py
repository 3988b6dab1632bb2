"""The Hugging Face hub: models in its caches on this machine, and requests, whose errors become ftkit's.

huggingface_hub is imported only for requests, and for models that are in the cache. All functions take `environment`,
the variables that Hugging Face's libraries read (the hub's address, its token, its cache), and `default_home`, the
job's cache unless HF_HOME is set.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from ftkit.errors import NotFoundError, PrerequisiteError, one_line
from ftkit.models.folder import missing_files
from ftkit.models.weight_files import CONFIG_FILE
from ftkit.paths import is_path

if TYPE_CHECKING:
    from ftkit.models.architecture import ModelSpec

log = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
DEFAULT_ENDPOINT = "https://huggingface.co"
TIMEOUT_SECONDS = 10
_FORBIDDEN = 403
FALSE = ("", "0", "no", "off", "false")
MODEL_CACHE = ("hub", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")


def find_folder(model: ModelSpec, environment: Mapping[str, str], default_home: Path) -> Path | None:
    """Return the folder on this machine with a model's files: its own, or one in the hub's cache; None without one."""
    if model.weights == "random":
        return None
    if is_path(model.weights):
        folder = Path(model.weights)
        return folder if (folder / CONFIG_FILE).is_file() else None
    return find_cached(model.weights, CONFIG_FILE, model.revision, environment, default_home)


def find_tokenizer(model: ModelSpec, environment: Mapping[str, str], default_home: Path) -> Path | None:
    """Return the folder on this machine with a model's tokenizer; None if a hub model's was not downloaded."""
    is_own = model.tokenizer.source == "model"
    source = model.weights if is_own else model.tokenizer.source
    if is_path(source):
        return Path(source) if Path(source).is_dir() else None
    if source == "random" or model.tokenizer.vocab_size is not None:  # trained on the data
        return None
    return find_cached(source, TOKENIZER_FILE, model.revision if is_own else None, environment, default_home)


def find_cached(
    name: str, file: str, revision: str | None, environment: Mapping[str, str], default_home: Path
) -> Path | None:
    """Return the folder of the hub's cache with a model's file; None if it has not."""
    cache = cache_folder(environment, default_home, *MODEL_CACHE)
    if not (cache / f"models--{name.replace('/', '--')}").is_dir():  # true for most models, and saves the import
        return None
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    found = try_to_load_from_cache(name, file, cache_dir=cache, revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def is_fetched(model: ModelSpec, environment: Mapping[str, str], default_home: Path) -> bool:
    """Return whether a model's weights need no download."""
    if model.weights == "random" or is_path(model.weights):
        return True
    folder = find_folder(model, environment, default_home)
    return folder is not None and not missing_files(folder)


def cache_folder(environment: Mapping[str, str], default_home: Path, name: str, *variables: str) -> Path:
    """Return the folder of the first set variable; else `name` below HF_HOME or `default_home`."""
    named = next((environment[variable] for variable in variables if environment.get(variable)), None)
    return Path(named or Path(environment.get("HF_HOME") or default_home, name)).expanduser()


def offline_variable(environment: Mapping[str, str], library: str = "TRANSFORMERS_OFFLINE") -> str | None:
    """Return the variable that forbids requests to the hub: huggingface_hub's or a library's; None if none does."""
    names = ("HF_HUB_OFFLINE", library)
    return next((name for name in names if environment.get(name, "").lower() not in FALSE), None)


def read_token(environment: Mapping[str, str]) -> str | None:
    """Return the hub's token: from the variable, or from the file of `hf auth login`."""
    home = environment.get("HF_HOME") or Path(environment.get("HOME") or "~").expanduser() / ".cache" / "huggingface"
    path = Path(environment.get("HF_TOKEN_PATH") or Path(home, "token")).expanduser()
    places = {name: environment.get(name, "") for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")}
    with suppress(OSError, UnicodeDecodeError):
        places[str(path)] = path.read_text(encoding="utf-8")
    for place, content in places.items():
        token = content.strip()
        if token and not re.fullmatch(r"[!-~]+", token):  # the HTTP library's error would contain it
            raise PrerequisiteError(
                f"the content of {place} is not a hub token: a token is one word",
                fix="create one in the settings of your account on the hub",
            )
        if token:
            return token
    return None


def endpoint_of(environment: Mapping[str, str]) -> str:
    return (environment.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


class Repository(NamedTuple):
    """A repository in a recipe, with its key."""

    kind: Literal["model", "dataset"]
    key: str
    name: str
    revision: str | None


class Answer(NamedTuple):
    """The hub's answer about a repository: a warning if there is none, missing files, and the revision's commit."""

    warning: str | None
    missing: list[str]
    commit: str | None = None


def repository_of(model: ModelSpec) -> Repository:
    return Repository("model", "model.weights", model.weights, model.revision)


def ask(wanted: Repository, files: tuple[str, ...], environment: Mapping[str, str]) -> Answer:
    """Ask the hub for files of a repository, without downloading them.

    Raises NotFoundError without such a repository or revision, and PrerequisiteError if access is denied.
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
        except errors.RevisionNotFoundError as error:
            section = wanted.key.rpartition(".")[0]
            raise NotFoundError(
                f"{section}.revision: '{wanted.name}' has no revision '{wanted.revision or 'main'}'",
                fix=f"give a branch, a tag or a commit that the {wanted.kind}'s page lists",
                name="no-revision",
            ) from error
        except errors.HfHubHTTPError as error:
            response = getattr(error, "response", None)
            status = 0 if response is None else int(response.status_code)
            if isinstance(error, errors.GatedRepoError):
                status = _FORBIDDEN
            message = "" if response is None else str(response.headers.get("X-Error-Message"))
            if token is not None and status == 401 and message.startswith("Invalid credentials"):  # noqa: PLR2004
                raise PrerequisiteError(
                    f"{wanted.key}: the hub does not accept your token, so it was not asked for '{wanted.name}'",
                    meaning="the token expired, was revoked, or is incomplete",
                    fix="make a new one in the hub's settings, and set HF_TOKEN; public models need none",
                    name="bad-token",
                ) from error
            _refuse(wanted, status, has_token=token is not None)
            return Answer(f"the hub answered {status} when asked for '{wanted.name}': the job will ask again", missing)
        except Exception as error:  # noqa: BLE001 - of the client's HTTP library
            reason = one_line(error)
            warning = f"can't ask the hub whether '{wanted.name}' may be read ({reason}): the job will check it"
            return Answer(warning, missing)
    return Answer(None, missing, commit)


def _refuse(wanted: Repository, status: int, *, has_token: bool) -> None:
    """Raise the error for a status of the hub that is about the repository."""
    if status == _FORBIDDEN:
        raise PrerequisiteError(
            f"{wanted.key}: '{wanted.name}' is gated, and "
            + ("your token may not read it" if has_token else "there is no token"),
            meaning="its owner shares it with those who have accepted its license",
            fix=f"accept the license on the {wanted.kind}'s page; then set HF_TOKEN, or give --hf-token-file",
            name="gated",
        )
    if status in {401, 404}:
        raise NotFoundError(
            f"{wanted.key}: the hub has no {wanted.kind} '{wanted.name}' that "
            + ("your token may read" if has_token else "can be read without a token"),
            meaning=f"the name is misspelled, the {wanted.kind} is private, or the token is wrong",
            fix=f"check the name; set HF_TOKEN, or give --hf-token-file, for a private {wanted.kind}",
            name="no-repository",
        )


def download_file(model: ModelSpec, name: str, environment: Mapping[str, str], default_home: Path) -> Path:
    """Download one file of a hub model into the cache; return its path. Raises the client's own errors."""
    from huggingface_hub import hf_hub_download  # noqa: PLC0415

    file = hf_hub_download(
        model.weights, name, revision=model.revision, endpoint=endpoint_of(environment),
        cache_dir=cache_folder(environment, default_home, *MODEL_CACHE), token=read_token(environment) or False,
        etag_timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    return Path(file)
