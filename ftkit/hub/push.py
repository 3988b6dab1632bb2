"""Upload an export to the Hugging Face hub, and verify the upload."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftkit.errors import PrerequisiteError, one_line
from ftkit.files import files_in, sha256_of
from ftkit.hub.client import endpoint_of, read_token

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_PATHS_PER_REQUEST = 100
_XET_RETRIES = ("HF_XET_CLIENT_RETRY_MAX_DURATION", "60s")
"""How long hf_xet repeats a request that fails. By default it is silent for 4 minutes."""


def check_hub_access(address: str) -> str:
    """Check that there is a token with write access; return the repository's name."""
    repository, token = address.partition("://")[2].strip("/"), read_token(os.environ)
    if repository.count("/") != 1:
        raise PrerequisiteError(f"{address}: a model of the hub is hf://ORGANIZATION/NAME", fix="correct the address")
    if token is None:
        raise PrerequisiteError(
            f"{address}: there is no token for the Hugging Face hub", fix="set HF_TOKEN, or run 'hf auth login'"
        )
    with _errors(address):
        _hub().whoami()
    return repository


def push_to_hub(folder: Path, address: str, report: Callable[[str], None]) -> str:
    """Upload an export as one commit, and compare each file's digest; return the commit's address.

    A new repository is private. Existing content is not uploaded again, and former files stay in the repository's
    history.
    """
    repository = check_hub_access(address)
    api = _hub()
    with _errors(address):
        api.create_repo(repository, private=True, exist_ok=True)
        report(f"uploading to {repository}")
        commit = api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Export {folder.name}")
        names = [path.relative_to(folder).as_posix() for path in files_in(folder)]
        uploaded: dict[str, Any] = {}
        for first in range(0, len(names), _PATHS_PER_REQUEST):
            infos = api.get_paths_info(repository, names[first : first + _PATHS_PER_REQUEST], revision=commit.oid)
            uploaded |= {info.path: info for info in infos}
    wrong = [name for name in names if not _is_same(folder / name, uploaded.get(name))]
    if wrong:
        raise PrerequisiteError(
            f"{address} has other content than was uploaded: {', '.join(wrong[:3])}",
            meaning="the upload was damaged in transit",
            fix="repeat the command",
        )
    return str(commit.commit_url)


def _hub() -> HfApi:
    os.environ.setdefault(*_XET_RETRIES)
    from huggingface_hub import HfApi  # noqa: PLC0415 - heavy, and only copies to the hub need it

    return HfApi(endpoint=endpoint_of(os.environ), token=read_token(os.environ))


def _is_same(path: Path, info: Any) -> bool:
    """Compare a file with the digest in the hub's commit: SHA-256 of large files, git's SHA-1 of others.

    For a large file it is the digest that huggingface_hub committed: computed by itself, or by hf_xet while it uploads.
    """
    if info is None or info.size != path.stat().st_size:
        return False
    if info.lfs is not None:
        return bool(info.lfs.sha256 == sha256_of(path))
    content = path.read_bytes()
    header = f"blob {len(content)}\0".encode()
    return bool(info.blob_id == hashlib.sha1(header + content, usedforsecurity=False).hexdigest())


@contextmanager
def _errors(address: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    try:
        yield
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        raise PrerequisiteError(
            f"can't write to {address}: {one_line(error)}",
            meaning="the token has no write access, the name is wrong, or the hub is unreachable",
            fix="see 'hf auth whoami'; give HF_TOKEN write access; if only Xet's servers, through which "
            "huggingface_hub uploads, are unreachable: HF_HUB_DISABLE_XET=1",
        ) from error
