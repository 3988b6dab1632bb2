"""The build context of an image: Dockerfile, lock, definition, and a wheel of ftkit."""

from __future__ import annotations

import hashlib
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from ftkit import assets
from ftkit.errors import ImageError
from ftkit.images.lock import read_lock
from ftkit.images.oci.tar import FILE, Member, write_end, write_member, write_padding
from ftkit.wheel import WHEEL_NAME, make_wheel

if TYPE_CHECKING:
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
        WHEEL_NAME: make_wheel(),
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
