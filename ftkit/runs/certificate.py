"""The certificate of an export: how outputs of inference engines on its files differ from the trained model's."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ftkit import __version__
from ftkit.errors import TrainingError
from ftkit.files import read_json, read_json_if_valid
from ftkit.models.folder import EXPORT_RECORD
from ftkit.runs.checkpoints import SavedFile
from ftkit.runs.model_card import CARD_FILE, CURVE_FILE, RECIPE_FILE, append_table
from ftkit.runs.signing import signature_file, verify_beside

CERTIFICATE = "certificate.json"
UNCERTIFIED = {
    CARD_FILE, CURVE_FILE, RECIPE_FILE, EXPORT_RECORD, CERTIFICATE, signature_file(Path(CERTIFICATE)).name,
    ".gitattributes",
}  # fmt: skip
"""Files that no engine reads; the hub adds the last one to each model."""
_TITLE = "## Verified engines"


@dataclass(frozen=True)
class Check:
    """The result of one comparison, and whether it failed."""

    name: str
    found: str
    passed: bool


@dataclass(frozen=True)
class EngineResult:
    """The comparison in one engine; `options` are the user's, and `dtype` is the one requested of its server."""

    engine: str
    version: str
    dtype: str
    options: tuple[str, ...]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


@dataclass(frozen=True)
class Certificate:
    """The content of certificate.json; `files` are the files that engines read."""

    run: str
    step: int
    kind: Literal["model", "adapters"]
    files: Mapping[str, SavedFile]
    engines: tuple[EngineResult, ...]
    verdict: Literal["passed", "failed"]
    ftkit: str = __version__
    version: Literal[1] = 1


def make_certificate(
    folder: Path, run: str, step: int, kind: Literal["model", "adapters"], engines: Sequence[EngineResult]
) -> Certificate:
    verdict: Literal["passed", "failed"] = "passed" if all(each.passed for each in engines) else "failed"
    files = {name: SavedFile.of(folder / name) for name in _files_of_engines(folder)}
    return Certificate(run, step, kind, files, tuple(engines), verdict)


def _files_of_engines(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file() and path.name not in UNCERTIFIED)


def _uncertified_files(certificate: Certificate, folder: Path) -> list[str]:
    """Return the files that were changed or removed, and those that were added: an engine may read them too."""
    changed = [name for name, file in certificate.files.items() if not file.is_content_of(folder / name)]
    return changed + [name for name in _files_of_engines(folder) if name not in certificate.files]


def require_certificate(folder: Path, public_key: Path) -> list[str]:
    """Return the engines of an export's certificate; refuse one not signed with the key, of other files, or failed."""
    verify_beside(folder / CERTIFICATE, public_key, "ftkit-certificate")
    certificate = read_json(folder / CERTIFICATE, Certificate)
    wrong = _uncertified_files(certificate, folder) if certificate else []
    if certificate is None or wrong or certificate.verdict != "passed":
        raise TrainingError(
            f"{folder} has no certificate that passed, of these files: {', '.join(wrong) or 'it failed'}",
            meaning="files were changed, added or exported again since then, or an engine computes differently",
            fix="certify it: ftkit verify DIR --engine NAMES",
        )
    return [f"{each.engine} {each.version}" for each in certificate.engines]


def keep_certificate(folder: Path, again: Path) -> None:
    """Copy the certificate of an export to a folder with a new export; `settle_certificate` keeps or removes it."""
    for path in (folder / CERTIFICATE, signature_file(folder / CERTIFICATE)):
        if path.is_file():
            shutil.copy2(path, again)


def settle_certificate(folder: Path) -> None:
    """Add the certificate's table to the model card; remove a certificate of other files."""
    path = folder / CERTIFICATE
    certificate = read_json_if_valid(path, Certificate)
    if certificate is None or _uncertified_files(certificate, folder):
        path.unlink(missing_ok=True)
        signature_file(path).unlink(missing_ok=True)
        return
    rows = []
    for each in certificate.engines:
        checks = "<br>".join(f"{check.name}: {check.found}" for check in each.checks).replace("|", "\\|")
        passed = "passed" if each.passed else "failed"
        rows.append([f"{each.engine} {each.version}", each.dtype, " ".join(each.options), checks, passed])
    append_table(folder, _TITLE, ["engine", "dtype", "options", "compared", "result"], rows)
