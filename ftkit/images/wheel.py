"""The wheel of ftkit that goes into an image, zipped from the very files that run here.

So it works from a checkout, an editable install and an installed wheel alike, needs no build tool and no
network, and the same files give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

import ftkit
from ftkit import assets
from ftkit.errors import PrerequisiteError

if TYPE_CHECKING:
    from collections.abc import Iterator

_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
_TAG: Final = "py3-none-any"
_SKIPPED: Final = ("__pycache__", "_assets")


def wheel_name() -> str:
    """Return the wheel's file name."""
    return f"ftkit-{ftkit.__version__}-{_TAG}.whl"


def make_wheel() -> bytes:
    """Return the wheel.

    Raises:
        PrerequisiteError: this ftkit was not installed, so that nothing says what it depends on.
    """
    info = f"ftkit-{ftkit.__version__}.dist-info"
    members = dict(sorted(_files()))
    members[f"{info}/METADATA"] = _metadata()
    members[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: ftkit\nRoot-Is-Purelib: true\nTag: {_TAG}\n".encode()
    members[f"{info}/entry_points.txt"] = b"[console_scripts]\nftkit = ftkit.__main__:main\n"
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in members.items())
    members[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return output.getvalue()


def _files() -> Iterator[tuple[str, bytes]]:
    package = Path(ftkit.__file__).resolve().parent
    yield from _tree(package, "ftkit")
    yield from _tree(assets.CONTAINERS, "ftkit/_assets/containers")
    yield from _tree(assets.JOB_TEMPLATES, "ftkit/_assets/sbatch")
    yield "ftkit/_assets/Dockerfile", assets.DOCKERFILE.read_bytes()


def _tree(folder: Path, inside: str) -> Iterator[tuple[str, bytes]]:
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        if path.is_file() and not any(part in _SKIPPED or part.startswith(".") for part in relative.parts):
            yield f"{inside}/{relative.as_posix()}", path.read_bytes()


def _metadata() -> bytes:
    try:
        text = metadata.distribution("ftkit").read_text("METADATA")
    except metadata.PackageNotFoundError:
        text = None
    if not text:
        raise PrerequisiteError(
            "this ftkit is not installed, so its dependencies are not known",
            meaning="it runs from a folder on PYTHONPATH",
            fix="install it: pip install -e . in a checkout",
        )
    lines = text.splitlines(keepends=True)
    return "".join(
        f"Version: {ftkit.__version__}\n" if line.startswith("Version: ") else line for line in lines
    ).encode()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
