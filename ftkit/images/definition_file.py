"""A Singularity definition of an image, for sites that build their own."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from ftkit.config.image_reference import parse_reference
from ftkit.images import labels
from ftkit.images.context import assemble, dockerfile

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.config.load import ImageDefinition

_RUN = re.compile(r"^RUN ((?:[^\n]*\\\n)*[^\n]*)$", re.MULTILINE)


def definition_file(definition: ImageDefinition, files: Path | None = None) -> str:
    """Return the definition; it copies the build's files from `files`, or from the folder that it is built in.

    The steps are those of the Dockerfile.

    Raises:
        ConfigError: the base is no legal reference.
    """
    spec, context = definition.spec, assemble(definition)
    base = replace(parse_reference(spec.base.reference), digest=spec.base.digest)
    folder = f"{files}/" if files else ""
    certificate = context.arguments.get("PIP_CERT")
    sections = {
        "%files": [f"{folder}{name} /opt/ftkit/{name}" for name in sorted(context.files) if name != "Dockerfile"],
        "%post": [
            "set -eu",
            *([f"export PIP_CERT={shlex.quote(certificate)}"] if certificate else []),
            *(line for step in _RUN.findall(dockerfile(spec)) for line in step.splitlines()),
        ],
        "%environment": [
            f"export {name}={shlex.quote(value)}"
            for name, value in {"PYTHONUNBUFFERED": "1", **spec.environment}.items()
        ],
        "%labels": [f"{labels.REFERENCE} {spec.reference}", f"ftkit.lock-sha256 {context.lock_sha256}"],
        "%test": ["python3 -m ftkit.images.self_check"],
    }
    pinning = "" if spec.base.digest else " UNPINNED: no digest says which base this is."
    head = f"# {spec.reference}, as ftkit defines it.{pinning}\nBootstrap: docker\nFrom: {base.pinned}\n"
    return head + "".join(
        f"\n{title}\n" + "".join(f"    {line}\n" for line in lines) for title, lines in sections.items()
    )


def write_files(definition: ImageDefinition, folder: Path) -> None:
    """Write the files that the definition copies."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in assemble(definition).files.items():
        if name != "Dockerfile":
            (folder / name).write_bytes(data)
