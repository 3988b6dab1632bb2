"""Whether a model's weights can be had, asked before anything is submitted: a missing right must not cost a night."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from ftkit.errors import NotFoundError, PrerequisiteError
from ftkit.specs.load import is_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftkit.specs.model import ModelSpec

DEFAULT_ENDPOINT = "https://huggingface.co"
TIMEOUT_SECONDS = 10
FALSE = ("", "0", "no", "off", "false")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer: the file may be read. Following it would send the token to another host."""

    def redirect_request(self, *_: object) -> None:
        return None


def check_weights(model: ModelSpec, environment: Mapping[str, str], *, is_here: bool) -> str | None:
    """Check that a model's weights are there and may be read.

    Args:
        model: its weights are a folder, a hub id, or random.
        environment: where the hub, its token and its cache are named, as Hugging Face's libraries read them.
        is_here: whether the job will see the folders of this machine.

    Returns:
        A warning, if that can't be told from here.

    Raises:
        NotFoundError: there is no such folder, model or revision.
        PrerequisiteError: this token, or nobody without one, may read it.
    """
    if model.weights == "random":
        return None
    if is_path(model.weights):
        return _check_folder(Path(model.weights), is_here=is_here)
    if environment.get("HF_HUB_OFFLINE", "").lower() not in FALSE:
        return None  # the job looks into its cache, and says if it is not there
    return _ask_hub(model, environment)


def read_token(environment: Mapping[str, str]) -> str | None:
    """Return the hub's token: the variable's, or that of the file in which `hf auth login` leaves it."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if environment.get(name, "").strip():
            return environment[name].strip()
    home = environment.get("HF_HOME") or str(Path(environment.get("HOME", "~")).expanduser() / ".cache" / "huggingface")
    path = Path(environment.get("HF_TOKEN_PATH") or Path(home) / "token")
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _check_folder(folder: Path, *, is_here: bool) -> str | None:
    if not folder.is_dir() and not is_here:
        return f"model.weights: {folder} is not to be seen from here; the job must see it"
    wanted = {"config.json": [folder / "config.json"], "safetensors files": list(folder.glob("*.safetensors"))}
    missing = [name for name, paths in wanted.items() if not any(path.is_file() for path in paths)]
    if missing:
        raise NotFoundError(
            f"model.weights: {folder} has no {' and no '.join(missing)}",
            fix="give a folder in Hugging Face's layout, with weights as safetensors",
        )
    return None


def _ask_hub(model: ModelSpec, environment: Mapping[str, str]) -> str | None:
    endpoint = (environment.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
    revision = model.revision or "main"
    token = read_token(environment)
    request = urllib.request.Request(  # noqa: S310 - the address is the user's own setting
        f"{endpoint}/{quote(model.weights)}/resolve/{quote(revision, safe='')}/config.json",
        method="HEAD",
        headers={"Authorization": f"Bearer {token}"} if token else {},
    )
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_SECONDS):
            return None
    except urllib.error.HTTPError as error:
        error.close()
        if error.code < 400:  # noqa: PLR2004 - a redirect
            return None
        return _refusal(model, error.code, error.headers.get("X-Error-Code", ""), has_token=token is not None)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return f"can't ask the hub whether '{model.weights}' may be read ({reason}): the job will find out"


def _refusal(model: ModelSpec, status: int, code: str, *, has_token: bool) -> str:
    """Raise what an answer of the hub means; return a warning where it means nothing for the model."""
    if code == "RevisionNotFound":
        raise NotFoundError(
            f"model.revision: '{model.weights}' has no revision '{model.revision or 'main'}'",
            fix="give a branch, a tag or a commit that the model's page lists",
        )
    if code == "EntryNotFound":
        raise NotFoundError(
            f"model.weights: '{model.weights}' has no config.json",
            fix="give a model in transformers' layout: others can't be trained",
        )
    if code == "GatedRepo" or status == 403:  # noqa: PLR2004 - forbidden
        raise PrerequisiteError(
            f"model.weights: '{model.weights}' is gated, and "
            + ("your token may not read it" if has_token else "there is no token"),
            meaning="its owner shares it with those who have accepted its licence",
            fix="accept the licence on the model's page; then set HF_TOKEN, or give --hf-token-file",
        )
    if code == "RepoNotFound" or status in {401, 404}:
        raise NotFoundError(
            f"model.weights: the hub has no model '{model.weights}' that "
            + ("your token may read" if has_token else "can be read without a token"),
            meaning="the name is misspelt, the model is private, or the token is wrong",
            fix="check the name; set HF_TOKEN, or give --hf-token-file, for a private model",
        )
    return f"the hub answered {status} when asked for '{model.weights}': the job will find out whether it may be read"
