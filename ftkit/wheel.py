"""A wheel of the running ftkit, for images and login nodes.

It is zipped from the files of the running ftkit (PEP 427). So it works from a checkout with uncommitted changes, an
editable install, and an installed wheel alike, needs no build tool and no network, and the same files give the same
bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

from ftkit import __version__, assets
from ftkit.errors import PrerequisiteError
from ftkit.files import digest_of

_TAG: Final = "py3-none-any"
_INFO: Final = f"ftkit-{__version__}.dist-info"
_ZIP_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
WHEEL_NAME: Final = f"ftkit-{__version__}-{_TAG}.whl"


def shipped_files() -> dict[str, Path]:
    """Return the files of ftkit by their names in a wheel: code, recipes, examples, profiles, templates, images."""
    package = Path(__file__).resolve().parent
    tops = {
        "ftkit": package,
        "ftkit/_assets/containers": assets.CONTAINERS,
        "ftkit/_assets/examples": assets.EXAMPLES,
        "ftkit/_assets/sbatch": assets.JOB_TEMPLATES,
    }
    files = {"ftkit/_assets/Dockerfile": assets.DOCKERFILE}
    for name, top in tops.items():
        for path in top.rglob("*"):
            parts = path.relative_to(top).parts
            is_ours = not any(part in ("__pycache__", "_assets") or part.startswith(".") for part in parts)
            if is_ours and path.is_file():
                files["/".join((name, *parts))] = path
    return dict(sorted(files.items()))


@cache
def code_identity() -> str:
    """Return the version with a digest of all files: it is equal on two machines if they run the same code."""
    return f"{__version__}+{digest_of({name: path.read_bytes() for name, path in shipped_files().items()})[:12]}"


def make_wheel() -> bytes:
    members = {name: path.read_bytes() for name, path in shipped_files().items()}
    members[f"{_INFO}/METADATA"] = _metadata()
    members[f"{_INFO}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: ftkit\nRoot-Is-Purelib: true\nTag: {_TAG}\n".encode()
    members[f"{_INFO}/entry_points.txt"] = b"[console_scripts]\nftkit = ftkit.__main__:main\n"
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in members.items())
    members[f"{_INFO}/RECORD"] = (record + f"{_INFO}/RECORD,,\n").encode()
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            entry = zipfile.ZipInfo(name, _ZIP_EPOCH)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return output.getvalue()


def _metadata() -> bytes:
    try:
        text = metadata.distribution("ftkit").read_text("METADATA")
    except metadata.PackageNotFoundError:
        text = None
    if not text:
        raise PrerequisiteError(
            "this ftkit is not installed, so its dependencies are unknown",
            meaning="it runs from a folder on PYTHONPATH",
            fix="install it: pip install -e . in a checkout",
        )
    lines = text.splitlines(keepends=True)
    return "".join(f"Version: {__version__}\n" if line.startswith("Version: ") else line for line in lines).encode()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
