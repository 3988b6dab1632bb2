"""Copies of code in a run's folder: a script's folder, a user's package, the working tree's ftkit.

Copies are made at submission, so edits while the job is pending don't affect it. The plan and the manifest record the
digest of each copy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import ftkit
from ftkit.checkout import list_files, read_commit
from ftkit.errors import ConfigError, NotFoundError, PrerequisiteError, Problem
from ftkit.files import digest_of
from ftkit.planning.plan import CodePlan

_LIMIT_BYTES: Final = 64 * 2**20
_MAX_FILES: Final = 20_000
_SKIPPED: Final = {"__pycache__", "node_modules", "wandb"}
"""Folders without code. They and hidden folders are skipped in projects without a .gitignore."""
_NEVER_COPIED: Final = {".env", "__pycache__"}  # secrets and Python's bytecode: never copied, even if git tracks them
_PLANS: Final = "code.json"
DEV_CODE: Final = "ftkit"  # name of the copy of the working tree's ftkit


@dataclass(frozen=True)
class CodeCopy:
    """A copy of a folder, in memory: its plan, and the content of each file by its path within the folder."""

    plan: CodePlan
    files: Mapping[str, bytes]


def copy_code(
    folder: Path, name: str, option: str, *, is_package: bool = False, needs: str = "", exclude: Sequence[Path] = ()
) -> CodeCopy:
    """Copy the code in a folder: in a git checkout, all files that git does not ignore; else all except hidden files.

    `option` is the option that sets the folder, for messages. A folder that is a package needs its parent on
    PYTHONPATH. `needs` is a file that the copy must contain, even if git ignores it.
    """
    folder = Path(os.path.abspath(folder))  # noqa: PTH100 - without '..', and links stay links
    if not folder.is_dir():
        raise NotFoundError(f"{option}: {folder} is not a folder", fix=f"give the folder of the code: {option} DIR")
    prefix = f"{folder.name}/" if is_package else ""
    excluded = [each.absolute() for each in exclude]
    contents: dict[str, bytes] = {}
    num_bytes = 0
    try:
        listed = [Path(name) for name in list_files(folder) or ()]  # git's index still has deleted files
        paths = [path for path in listed if _NEVER_COPIED.isdisjoint(path.parts) and (folder / path).is_file()]
        if not (Path(needs) in paths if needs else paths):  # not a checkout, or one that ignores this folder
            paths = _walk(folder)
        for path in paths:
            if any((folder / path).is_relative_to(each) for each in excluded):
                continue
            num_bytes += (folder / path).stat().st_size
            if num_bytes > _LIMIT_BYTES or len(contents) >= _MAX_FILES:
                limits = f"{_LIMIT_BYTES >> 20} MiB or {_MAX_FILES:,} files, too many for code."
                fix = "Put the code into a separate folder; or list other files in .gitignore."
                raise ConfigError([Problem("command line", option, f"{folder} holds more than {limits}", fix)])
            contents[f"{prefix}{path.as_posix()}"] = (folder / path).read_bytes()
    except OSError as error:
        raise PrerequisiteError(f"{option}: can't read {error.filename}: {error.strerror}") from error
    commit = read_commit(folder)
    has_changes = bool(commit and commit.has_changes)
    plan = CodePlan(name, str(folder), digest_of(contents), commit.id if commit else None, has_changes)
    return CodeCopy(plan, contents)


def copy_selected(with_code: Sequence[Path], *, is_dev: bool, sent: Path | None = None) -> list[CodeCopy]:
    """Copy the code that the options select: packages or modules, and the running ftkit, to replace the image's.

    `sent` is a folder of copies from another machine, to read instead. Raises `ConfigError` if two packages have the
    same name, or if the sent copies were changed; also raises as `copy_code` does.
    """
    if sent is not None:
        return copies_of_run({"code": json.loads((sent / _PLANS).read_bytes())}, sent, allows_changes=False)
    folders = [Path(os.path.abspath(folder)) for folder in with_code]  # noqa: PTH100 - '..' must be resolved
    for first, second in pairwise(sorted(folders, key=lambda folder: folder.name)):
        if first.name == second.name:
            what = f"{first} and {second} have the same name."
            raise ConfigError([Problem("command line", "--with-code", what, "Rename one.")])
    copies = [
        copy_code(folder, f"with-{folder.name}", "--with-code", is_package=(folder / "__init__.py").is_file())
        for folder in folders
    ]
    if is_dev:
        copies.append(copy_code(Path(ftkit.__file__).parent, DEV_CODE, "--dev", is_package=True))
    return copies


def copies_of_run(manifest: Mapping[str, Any], folder: Path, *, allows_changes: bool) -> list[CodeCopy]:
    """Read the copies of a run to repeat it. ConfigError if one is changed or missing, unless `allows_changes`."""
    copies, problems = [], []
    for name, values in manifest.get("code", {}).items():
        try:
            plan = CodePlan(**values)
        except TypeError:
            what = "another version of ftkit described it, in another form."
            raise ConfigError([Problem("", f"code: {name}", what, "Use that version of ftkit.")]) from None
        files = {
            str(path.relative_to(folder / name)): path.read_bytes()
            for path in sorted((folder / name).rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }
        found = digest_of(files) if files else ""
        if found != plan.sha256 and not allows_changes:
            what = f"was changed: sha256 {found[:12]}, was {plan.sha256[:12]}" if found else "is not here"
            fix = "Repeat it from its own folder; or run it without that code, or with the current code: --allow code"
            problems.append(Problem("", f"code: {name}", f"the run's copy of {plan.source} {what}.", fix))
        elif files:
            copies.append(CodeCopy(replace(plan, sha256=found), files))
    if problems:
        raise ConfigError(problems)
    return copies


def sent_files(copies: Sequence[CodeCopy], folder: str) -> dict[str, bytes]:
    """Return the files of copies by path, in a folder that `copy_selected` reads on another machine."""
    plans = {copy.plan.name: asdict(copy.plan) for copy in copies}
    contents = {f"{folder}/{copy.plan.name}/{path}": data for copy in copies for path, data in copy.files.items()}
    return {f"{folder}/{_PLANS}": json.dumps(plans).encode(), **contents}


def files_of(copies: Iterable[CodeCopy]) -> dict[str, str | bytes]:
    """Return the files of copies by their paths in the run's folder."""
    return {f"code/{copy.plan.name}/{path}": data for copy in copies for path, data in copy.files.items()}


def _walk(folder: Path) -> list[Path]:
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
        found += [Path(place, name).relative_to(folder) for name in sorted(names) if not name.startswith(".")]
        if len(found) > _MAX_FILES:
            break
    return found
