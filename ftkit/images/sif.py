"""SIF images for Apptainer and Singularity, made by that program, which spython drives."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.errors import ConfigError, ImageError, PrerequisiteError, Problem
from ftkit.images.choosing import choose_source, remote_of
from ftkit.images.oci import credentials
from ftkit.images.oci.rootfs import Contents
from ftkit.images.packing import Made
from ftkit.images.progress import Progress
from ftkit.images.sources import EngineSource
from ftkit.images.squashfs import explain_failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.images.choosing import ImportRequest
    from ftkit.images.progress import Report
    from ftkit.images.store import Format

_PROGRAMS = ("apptainer", "singularity")
_MAGIC = b"SIF_MAGIC"
_MAGIC_AT = 32


def find_program() -> str:
    """Return the path of Apptainer or Singularity.

    Raises:
        PrerequisiteError: neither is there.
    """
    for name in _PROGRAMS:
        if found := shutil.which(name):
            return found
    raise PrerequisiteError(
        "neither 'apptainer' nor 'singularity' was found on PATH",
        meaning="SIF files are made by that program",
        fix="install it, or log in where it is; often: module load apptainer",
    )


class SifSource:
    """An image that Apptainer or Singularity fetches; what it is, the engine or the registry says.

    Raises:
        ConfigError: it was to be made on a compute node.
        NotFoundError: neither engine nor registry has the image.
    """

    format: Format = "sif"

    def __init__(self, wish: ImportRequest, report: Report) -> None:
        if wish.on_node:
            raise ConfigError([Problem("", "--on-node", "SIF files are made on this machine.", "Leave --on-node out.")])
        self._known = choose_source(replace(wish, method="ftkit"), report)
        self._remote = None if isinstance(self._known, EngineSource) else remote_of(wish)
        self.image_id = self._known.image_id
        self.registry_digest = self._known.registry_digest
        self.is_vouched_for = self._known.is_vouched_for
        self.config = self._known.config

    def describe(self) -> str:
        """Say where the image comes from."""
        return self._known.describe()

    def make_file(self, partial: Path, report: Report) -> Made:
        """Run the program, and report what it says: all of it comes on its standard error.

        Raises:
            PrerequisiteError: the program or spython is missing.
            ImageError: it failed.
        """
        program = find_program()
        try:
            from spython.utils import stream_command  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise PrerequisiteError(
                "the Python package 'spython' is not installed", fix="pip install 'ftkit[images]'"
            ) from error
        address = self._address()
        said: list[str] = []
        with _in_environment(credentials.find(self._remote.host) if self._remote else None):
            try:
                for line in stream_command([program, "build", str(partial), address], output_type="both"):
                    said.append(line.rstrip())
                    report(Progress(f"{Path(program).name} builds SIF", text=said[-1]))
            except subprocess.CalledProcessError as error:
                raise explain_failure(program, "\n".join(said), partial) from error
        with partial.open("rb") as file:
            if file.read(_MAGIC_AT + len(_MAGIC))[_MAGIC_AT:] != _MAGIC:
                raise ImageError(
                    f"{program} made no SIF file", fix=f"see what it says: apptainer build x.sif {address}"
                )
        return Made(Contents(), Path(program).name)

    def _address(self) -> str:
        """Return the image as the program takes it: by digest or by the engine's id, because names can move."""
        if self._remote is None:
            return f"docker-daemon:{self.image_id}"
        return replace(self._remote, digest=self.registry_digest).docker_uri


@contextmanager
def _in_environment(known: credentials.Credentials | None) -> Iterator[None]:
    """Put credentials where the program reads them: spython gives it this process's environment."""
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
