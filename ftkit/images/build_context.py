"""The build context of an image - Dockerfile, lock, definition, a wheel of ftkit - and a Singularity definition."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from ftkit import assets
from ftkit.config.image_reference import parse_reference
from ftkit.errors import ImageError
from ftkit.images.docker_engine import REFERENCE_LABEL
from ftkit.images.lock import read_lock
from ftkit.images.oci.tar import END, FILE, Member, write_member, write_padding
from ftkit.wheel import WHEEL_NAME, make_wheel

if TYPE_CHECKING:
    from ftkit.config.image import ImageSpec
    from ftkit.config.load import ImageDefinition

_CERTIFICATES: Final = "certificates.crt"
_RUN: Final = re.compile(r"^RUN ((?:[^\n]*\\\n)*[^\n]*)$", re.MULTILINE)


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
        output.write(END)
        output.seek(0)
        return output


def assemble(definition: ImageDefinition) -> BuildContext:
    lock = read_lock(definition).encode()
    keys = {"name", "tag", "description", "families", "default_recipe", "provided", "imports"}
    image = definition.spec.model_dump(mode="json", include=keys)
    files = {
        "Dockerfile": _dockerfile(definition.spec).encode(),
        "requirements.lock": lock,
        WHEEL_NAME: make_wheel(),
        "image.json": (json.dumps(image, indent=1, sort_keys=True) + "\n").encode(),
    }
    arguments = {}
    for variable in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        if not (value := os.environ.get(variable)):
            continue
        if any(urlsplit(url).password or urlsplit(url).username for url in value.split()):
            raise ImageError(
                f"{variable} has a user name or password, which would stay in the image",
                meaning="build arguments can be read by everyone who has the image",
                fix=f"unset {variable}, or use an index that needs none",
            )
        arguments[variable] = value
    bundle = os.environ.get("PIP_CERT")
    if bundle and Path(bundle).is_file():
        files[_CERTIFICATES] = Path(bundle).read_bytes()
        arguments["PIP_CERT"] = f"/opt/ftkit/{_CERTIFICATES}"
    return BuildContext(files, arguments, hashlib.sha256(lock).hexdigest())


def _dockerfile(spec: ImageSpec) -> str:
    lines = [f"ENV {name}={_quoted(value)}\n" for name, value in sorted(spec.environment.items())]
    return assets.DOCKERFILE.read_text(encoding="utf-8") + "".join(lines)


def _quoted(value: str) -> str:
    return '"' + re.sub(r'(["\\$])', r"\\\1", value) + '"'


def definition_file(definition: ImageDefinition, files: Path | None = None) -> str:
    """Return the Singularity definition of an image: the Dockerfile's steps, with copies from the folder `files`."""
    spec, context = definition.spec, assemble(definition)
    base = replace(parse_reference(spec.base.reference), digest=spec.base.digest)
    folder = f"{files}/" if files else ""
    certificate = context.arguments.get("PIP_CERT")
    variables = {"PYTHONUNBUFFERED": "1", **spec.environment}
    sections = {
        "%files": [f"{folder}{name} /opt/ftkit/{name}" for name in sorted(context.files) if name != "Dockerfile"],
        "%post": [
            "set -eu",
            *([f"export PIP_CERT={shlex.quote(certificate)}"] if certificate else []),
            *(line for step in _RUN.findall(_dockerfile(spec)) for line in step.splitlines()),
        ],
        "%environment": [f"export {name}={shlex.quote(value)}" for name, value in variables.items()],
        "%labels": [f"{REFERENCE_LABEL} {spec.reference}", f"ftkit.lock-sha256 {context.lock_sha256}"],
        "%test": ["python3 -m ftkit.images.inside"],
    }
    warning = "" if spec.base.digest else " UNPINNED: the base has no digest, so its tag may be another image later."
    head = f"# {spec.reference}, as ftkit defines it.{warning}\nBootstrap: docker\nFrom: {base.pinned}\n"
    return head + "".join(
        f"\n{title}\n" + "".join(f"    {line}\n" for line in lines) for title, lines in sections.items()
    )


def write_files(definition: ImageDefinition, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in assemble(definition).files.items():
        if name != "Dockerfile":
            (folder / name).write_bytes(data)
