"""SIF images for Apptainer and Singularity, and Singularity definitions for sites that build their own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.config.image_reference import parse_reference
from ftkit.errors import ConfigError, ImageError, PrerequisiteError, Problem
from ftkit.images import docker_engine
from ftkit.images.build_context import assemble, dockerfile
from ftkit.images.import_image import DockerSource, select_source
from ftkit.images.oci.access import Credentials, find_credentials
from ftkit.images.progress import ProgressEvent
from ftkit.images.squashfs import Contents, MadeFile, explain_failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.config.image_reference import ImageFormat
    from ftkit.config.load import ImageDefinition
    from ftkit.images.import_image import ImportRequest
    from ftkit.images.progress import Report

_PROGRAMS = ("apptainer", "singularity")
_MAGIC = b"SIF_MAGIC"
_MAGIC_OFFSET = 32


def find_program() -> str:
    """Return the path of Apptainer or Singularity.

    Raises:
        PrerequisiteError: neither is on PATH.
    """
    for name in _PROGRAMS:
        if found := shutil.which(name):
            return found
    raise PrerequisiteError(
        "neither 'apptainer' nor 'singularity' was found on PATH",
        meaning="one of them is needed to make SIF files",
        fix="install one, or use a machine that has one; often: module load apptainer",
    )


class SifSource:
    """An image that Apptainer or Singularity pulls, and that the docker engine or the registry identifies.

    Raises:
        ConfigError: the request is for a compute node.
        NotFoundError: neither engine nor registry has the image.
    """

    format: ImageFormat = "sif"

    def __init__(self, request: ImportRequest, report: Report) -> None:
        if request.on_node:
            raise ConfigError([Problem("", "--on-node", "SIF files are made on this machine.", "Leave --on-node out.")])
        self._known = select_source(replace(request, method="ftkit"), report)
        self._remote = None if isinstance(self._known, DockerSource) else request.registry_image
        self.image_id = self._known.image_id
        self.registry_digest = self._known.registry_digest
        self.is_vouched_for = self._known.is_vouched_for
        self.config = self._known.config

    @property
    def origin(self) -> str:
        """Where the image comes from."""
        return self._known.origin

    def make_file(self, partial: Path, report: Report) -> MadeFile:
        """Run the program, and report its output, all of which is on stderr.

        Raises:
            PrerequisiteError: the program or spython is missing.
            ImageError: the program failed.
        """
        program = find_program()
        try:
            from spython.utils import stream_command  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise PrerequisiteError(
                "the Python package 'spython' is not installed", fix="pip install 'ftkit[images]'"
            ) from error
        address = self._address()
        output: list[str] = []
        with _in_environment(find_credentials(self._remote.host) if self._remote else None):
            try:
                for line in stream_command([program, "build", str(partial), address], output_type="both"):
                    output.append(line.rstrip())
                    report(ProgressEvent(f"{Path(program).name} builds SIF", text=output[-1]))
            except subprocess.CalledProcessError as error:
                raise explain_failure(program, "\n".join(output), partial) from error
        with partial.open("rb") as file:
            if file.read(_MAGIC_OFFSET + len(_MAGIC))[_MAGIC_OFFSET:] != _MAGIC:
                raise ImageError(f"{program} wrote no SIF file", fix=f"see its output: apptainer build x.sif {address}")
        return MadeFile(Contents(), Path(program).name)

    def _address(self) -> str:
        """Return the image's address for the program, by digest or by docker's image id, because tags can move."""
        if self._remote is None:
            return f"docker-daemon:{self.image_id}"
        return f"docker://{replace(self._remote, digest=self.registry_digest).pinned}"


@contextmanager
def _in_environment(known: Credentials | None) -> Iterator[None]:
    """Set the program's environment variables for credentials: spython passes this process's environment to it."""
    before = dict(os.environ)
    if known:
        for prefix in ("APPTAINER", "SINGULARITY"):
            os.environ[f"{prefix}_DOCKER_USERNAME"] = known.username
            os.environ[f"{prefix}_DOCKER_PASSWORD"] = known.password
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


_RUN = re.compile(r"^RUN ((?:[^\n]*\\\n)*[^\n]*)$", re.MULTILINE)


def definition_file(definition: ImageDefinition, files: Path | None = None) -> str:
    """Return the Singularity definition of an image; its steps are those of the Dockerfile.

    Args:
        definition: the image.
        files: the folder to copy the build's files from; if None, the folder in which the definition is built.

    Raises:
        ConfigError: the base is not a valid reference.
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
        "%labels": [f"{docker_engine.REFERENCE_LABEL} {spec.reference}", f"ftkit.lock-sha256 {context.lock_sha256}"],
        "%test": ["python3 -m ftkit.images.self_check"],
    }
    warning = "" if spec.base.digest else " UNPINNED: the base has no digest, so its tag may be another image later."
    head = f"# {spec.reference}, as ftkit defines it.{warning}\nBootstrap: docker\nFrom: {base.pinned}\n"
    return head + "".join(
        f"\n{title}\n" + "".join(f"    {line}\n" for line in lines) for title, lines in sections.items()
    )


def write_files(definition: ImageDefinition, folder: Path) -> None:
    """Write the files that the Singularity definition copies."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in assemble(definition).files.items():
        if name != "Dockerfile":
            (folder / name).write_bytes(data)
