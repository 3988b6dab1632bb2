"""Bundles: one file with a run's inputs and results, without weights and data, to share and to repeat the run.

A bundle is a tar archive of plain files. The same run folder gives the same bytes: members are sorted, and have neither
owner nor time. A signature is a separate file next to it.
"""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.errors import NotFoundError, PrerequisiteError, one_line
from ftkit.files import DamagedFileError, output_file, read_json, read_small, to_json
from ftkit.planning.layout import DataLayout, RunLayout, Workspace
from ftkit.runs.manifest import Values

if TYPE_CHECKING:
    from ftkit.runs.signing import Purpose

SIGNED_AS: Purpose = "ftkit-bundle"
_MAX_MEMBER_BYTES = 2**30


def write_bundle(layout: RunLayout, path: Path, lock: Path | None = None) -> list[str]:
    """Write a run's bundle and return the names of its members.

    `lock` is that of the image's packages, if it is on this machine. Raises `DamagedFileError` if a file of the run
    can't be read, or is too large.
    """
    manifest = read_json(layout.manifest, Values)
    if manifest is None:
        raise NotFoundError(f"{layout.root.name} has no manifest.json", meaning="a bundle without it can't be repeated")
    data = DataLayout(Workspace(layout.root.parents[1]).data / str(manifest.get("data_fingerprint")))
    files = [
        layout.manifest, layout.plan, layout.script, layout.preparation_script, layout.submission, layout.metrics,
        layout.report, layout.code_changes, layout.original,
    ]  # fmt: skip
    sources = {file.name: file for file in files} | {"data-manifest.json": data.manifest}
    sources |= {"requirements.lock": lock} if lock else {}
    contents = {"recipe.json": to_json(manifest.get("resolved_recipe", {})).encode()}
    for name, file in sources.items():
        try:
            if file.is_file():
                contents[name] = read_small(file, _MAX_MEMBER_BYTES)
        except OSError as error:
            raise DamagedFileError(file, one_line(error)) from error
    try:
        with output_file(path) as temporary, tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as archive:
            for name in sorted(contents):
                member = tarfile.TarInfo(f"{layout.root.name}/{name}")
                member.size, member.mode = len(contents[name]), 0o644
                archive.addfile(member, io.BytesIO(contents[name]))
    except OSError as error:
        raise PrerequisiteError(
            f"can't write {path}: {one_line(error)}",
            meaning="the folder does not exist, is full, or belongs to somebody else",
            fix="write the bundle somewhere else: --output FILE",
        ) from error
    return sorted(contents)


def unpack(path: Path, folder: Path) -> None:
    """Write the plain files of a bundle that have names of a run's files; DamagedFileError if it is damaged."""
    layout = RunLayout(folder)
    known = {layout.manifest.name, layout.plan.name, layout.metrics.name, layout.original.name, layout.report.name}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name).name
                if not member.isfile() or name not in known:
                    continue
                if member.size > _MAX_MEMBER_BYTES:
                    raise DamagedFileError(path, f"{name} has {member.size:,} bytes")
                if source := archive.extractfile(member):
                    with source, (folder / name).open("wb") as target:
                        shutil.copyfileobj(source, target)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DamagedFileError(path, "it is not a complete tar archive") from error
    if not layout.manifest.is_file():
        raise DamagedFileError(path, "it has no manifest.json")
