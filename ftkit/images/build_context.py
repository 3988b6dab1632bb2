"""The build context of an image: Dockerfile, lock, definition, and a wheel of ftkit.

The wheel is zipped from the files of the running ftkit. So it works from a checkout, an editable install and an
installed wheel alike, needs no build tool and no network, and the same files give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import ftkit
from ftkit import assets
from ftkit.errors import ImageError, PrerequisiteError
from ftkit.images.lock import read_lock
from ftkit.images.oci.tar import FILE, Member, write_end, write_member, write_padding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.config.image import ImageSpec
    from ftkit.config.load import ImageDefinition

_CERTIFICATES: Final = "certificates.crt"
_INDEX_VARIABLES: Final = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")


@dataclass(frozen=True)
class BuildContext:
    """The input of a build: files by name, values of the Dockerfile's ARGs, and the digest of the lock."""

    files: dict[str, bytes]
    arguments: dict[str, str]
    lock_sha256: str

    def digest(self, base: str) -> str:
        """Return a digest of everything that the image depends on; `base` identifies the base."""
        running = hashlib.sha256(base.encode())
        for name, data in sorted(self.files.items()):
            running.update(f"\n{name} {len(data)}\n".encode())
            running.update(data)
        return running.hexdigest()

    def archive(self, labels: dict[str, str]) -> io.BytesIO:
        """Return the files as a tar archive, with the labels as the Dockerfile's last step."""
        words = " ".join(f"{name}={_quoted(value)}" for name, value in sorted(labels.items()))
        files = {**self.files, "Dockerfile": self.files["Dockerfile"] + f"LABEL {words}\n".encode()}
        output = io.BytesIO()
        for name, data in sorted(files.items()):
            write_member(output, Member(name.encode(), FILE, size=len(data)))
            output.write(data)
            write_padding(output, len(data))
        write_end(output)
        output.seek(0)
        return output


def assemble(definition: ImageDefinition) -> BuildContext:
    """Assemble the context of an image.

    Raises:
        ImageError: its lock is missing or stale, or a package index needs a password.
    """
    lock = read_lock(definition).encode()
    files = {
        "Dockerfile": dockerfile(definition.spec).encode(),
        "requirements.lock": lock,
        wheel_name(): make_wheel(),
        "image.json": (json.dumps(_definition(definition.spec), indent=1, sort_keys=True) + "\n").encode(),
    }
    arguments = _index_arguments()
    bundle = os.environ.get("PIP_CERT")
    if bundle and Path(bundle).is_file():
        files[_CERTIFICATES] = Path(bundle).read_bytes()
        arguments["PIP_CERT"] = f"/opt/ftkit/{_CERTIFICATES}"
    return BuildContext(files, arguments, hashlib.sha256(lock).hexdigest())


def dockerfile(spec: ImageSpec) -> str:
    """Return the Dockerfile with the image's environment variables at the end."""
    lines = [f"ENV {name}={_quoted(value)}\n" for name, value in sorted(spec.environment.items())]
    return assets.DOCKERFILE.read_text(encoding="utf-8") + "".join(lines)


def _definition(spec: ImageSpec) -> dict[str, object]:
    return spec.model_dump(
        mode="json", include={"name", "tag", "description", "families", "default_recipe", "provided", "imports"}
    )


def _quoted(value: str) -> str:
    escaped = "".join("\\" + character if character in '\\"$' else character for character in value)
    return f'"{escaped}"'


def _index_arguments() -> dict[str, str]:
    """Return build arguments for the site's package index.

    Raises:
        ImageError: an address has a user name or password, which the image's history would show.
    """
    found = {}
    for variable in _INDEX_VARIABLES:
        value = os.environ.get(variable)
        if not value:
            continue
        if any(urlsplit(url).password or urlsplit(url).username for url in value.split()):
            raise ImageError(
                f"{variable} has a user name or password, which would stay in the image",
                meaning="build arguments can be read by everyone who has the image",
                fix=f"unset {variable}, or use an index that needs none",
            )
        found[variable] = value
    return found


_ZIP_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
_TAG: Final = "py3-none-any"
_SKIPPED: Final = ("__pycache__", "_assets")


def wheel_name() -> str:
    """Return the wheel's file name."""
    return f"ftkit-{ftkit.__version__}-{_TAG}.whl"


def make_wheel() -> bytes:
    """Return the wheel.

    Raises:
        PrerequisiteError: this ftkit was not installed, so its dependencies are unknown.
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
            entry = zipfile.ZipInfo(name, _ZIP_EPOCH)
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


def _tree(folder: Path, prefix: str) -> Iterator[tuple[str, bytes]]:
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        if path.is_file() and not any(part in _SKIPPED or part.startswith(".") for part in relative.parts):
            yield f"{prefix}/{relative.as_posix()}", path.read_bytes()


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
    return "".join(
        f"Version: {ftkit.__version__}\n" if line.startswith("Version: ") else line for line in lines
    ).encode()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
