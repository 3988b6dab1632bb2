"""Fill in the templates of job scripts.

Every value in a script must pass through one of the filters below; Jinja refuses a value without a filter. A file in a
project's `sbatch/` folder overrides the shipped template of the same name.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shlex
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import jinja2
from jinja2 import FileSystemBytecodeCache, FunctionLoader, StrictUndefined
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ftkit import __version__, assets
from ftkit.config.context import cache_folder
from ftkit.errors import ConfigError, Problem, one_line
from ftkit.files import read_small

if TYPE_CHECKING:
    from jinja2.bccache import Bucket

OVERRIDDEN_PARTS: Final = "overridden_parts"
"""Key in a run's manifest for the parts of job scripts that the project overrides, each with its SHA-256."""


def fill(template: str, project: Path | None, /, **values: object) -> str:
    """Fill in a template. A project's `sbatch/` overrides parts of it; without a project, only shipped parts are used.

    Raises `ConfigError` if a value can't be expressed for Slurm or bash, or if a project's own part has an error.
    Errors in shipped templates are bugs and raised unchanged.
    """
    try:
        return _environment(project).get_template(template).render(values)
    except (TemplateError, TypeError) as error:
        if project is None:
            raise
        frames, folder = traceback.extract_tb(error.__traceback__), project / "sbatch"
        own = [frame for frame in frames if Path(frame.filename).is_relative_to(folder)]
        is_of_ftkit = isinstance(error, TypeError) and "jinja2" not in frames[-1].filename
        if not own or (is_of_ftkit and frames[-1] not in own):
            raise
        what = "uses what templates may not" if isinstance(error, SecurityError) else "can't be filled in"
        fix = f"Compare it with the shipped part in {assets.JOB_TEMPLATES}, or remove it."
        where = f"sbatch/{Path(own[-1].filename).relative_to(folder)}, line {own[-1].lineno}"
        raise ConfigError([Problem("", where, f"{what}: {one_line(error)}.", fix)]) from error


@cache
def _environment(project: Path | None) -> ImmutableSandboxedEnvironment:
    compiler = Path(jinja2.__file__).stat().st_mtime_ns  # bytecode depends on Jinja's version
    environment = ImmutableSandboxedEnvironment(
        loader=FunctionLoader(partial(_load, project)),
        bytecode_cache=_CompiledTemplates(str(cache_folder(os.environ) / f"templates-{__version__}-{compiler}")),
        undefined=StrictUndefined,
        finalize=_refuse_unfiltered,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "sh": quote_word,
        "sbatch": quote_directive,
        "sbatch_path": quote_log_path,
        "comment": show_in_comment,
        "verbatim": as_bash,
    }
    return environment


class _CompiledTemplates(FileSystemBytecodeCache):
    """Caches compiled templates in the user's cache folder: compiling them takes a tenth of a dry run."""

    def load_bytecode(self, bucket: Bucket) -> None:
        try:
            super().load_bytecode(bucket)
        except (OSError, EOFError, pickle.UnpicklingError):  # damaged, or not readable: compiled again
            bucket.reset()

    def dump_bytecode(self, bucket: Bucket) -> None:
        with suppress(OSError):  # the home folder is full, or read-only: compiled again next time
            Path(self.directory).mkdir(parents=True, exist_ok=True)
            super().dump_bytecode(bucket)


# --- Filters -------------------------------------------------------------------------------------


class _Safe(str):
    """Text that passed through a filter."""

    __slots__ = ()


def quote_word(value: object) -> str:
    text = str(value)
    if "\0" in text:
        raise ConfigError([Problem("", "", f"scripts and variables can't contain a NUL byte: {text!r}.")])
    return _Safe(shlex.quote(text))


def quote_directive(value: object) -> str:
    """Quote a value for an #SBATCH line: in double quotes with backslash escapes, where `#` still begins a comment."""
    text = str(value)
    if any(ord(character) < ord(" ") or character == "\x7f" for character in text):
        raise ConfigError([Problem("", "", f"an #SBATCH line can't contain control characters: {text!r}.")])
    if text and shlex.quote(text) == text:
        return _Safe(text)
    return _Safe('"' + re.sub(r'[\\"#]', r"\\\g<0>", text) + '"')


def quote_log_path(value: object) -> str:
    """Quote a path for `#SBATCH --output`, in which `%` begins a pattern."""
    text = str(value)
    if "\\" in text:
        fix = "Use another workspace folder."
        raise ConfigError([Problem("", "", f"Slurm can't write a log to a path with a backslash: {text}.", fix)])
    return quote_directive(text.replace("%", "%%"))


def show_in_comment(value: object) -> str:
    """Reduce a value to one line, for a comment."""
    return _Safe(" ".join(str(value).split()))


def as_bash(value: object) -> str:
    """Mark text as bash and leave it unchanged, such as the lines of a site's profile."""
    return _Safe(value)


def _refuse_unfiltered(value: object) -> str:
    if not isinstance(value, _Safe):
        raise TemplateError(f"a template prints {value!r} without a filter")
    return value


# --- A project's own parts -----------------------------------------------------------------------


def find_overrides(project: Path) -> dict[str, str]:
    """Return the SHA-256 of each shipped template that a project overrides; ConfigError if a part can't be read."""
    names = sorted(str(path.relative_to(assets.JOB_TEMPLATES)) for path in assets.JOB_TEMPLATES.rglob("*.j2"))
    found = {name: _override(project, name) for name in names}
    return {name: hashlib.sha256(_read(path).encode()).hexdigest() for name, path in found.items() if path}


def find_misnamed(project: Path) -> list[str]:
    """Return a project's templates that override nothing, because no shipped template has their name."""
    folder = project / "sbatch"
    names = (path.relative_to(folder) for path in folder.rglob("*.j2"))
    return sorted(str(name) for name in names if not (assets.JOB_TEMPLATES / name).is_file())


def _override(project: Path | None, name: str) -> Path | None:
    if project is None:
        return None
    folder = project / "sbatch"
    if not os.path.lexists(folder / name) or folder.resolve() == assets.JOB_TEMPLATES.resolve():  # ftkit's own checkout
        return None
    return folder / name


def _load(project: Path | None, template: str) -> tuple[str, str, Callable[[], bool]] | None:
    """Return a template's text, its path, and a check whether it is current; None if there is no such template.

    Raises `ConfigError` if the project's part can't be read, or lacks a placeholder of the shipped part.
    """
    shipped = assets.JOB_TEMPLATES / template
    if ".." in template or not shipped.is_file():
        return None
    text = shipped.read_text(encoding="utf-8")
    path = _override(project, template)
    if path is None:
        return text, str(shipped), lambda: _override(project, template) is None
    own = _read(path)
    if lost := sorted(_placeholders(text) - _placeholders(own)):
        what = f"lacks placeholders of the part it overrides: {', '.join(lost)}."
        fix = "Copy the lines that have them from the shipped part, or remove the file."
        raise ConfigError([Problem("", f"sbatch/{template}", what, fix)])
    return own, str(path), lambda: False


def _read(path: Path) -> str:
    try:
        return read_small(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("", str(path), f"can't be read: {one_line(error)}.")]) from error


def _placeholders(template: str) -> set[str]:
    """Return the names that a template uses and the parts that it includes, except optional names in conditions."""
    filled, conditions = (
        {name for text in re.findall(pattern, template) for name in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", text)}
        for pattern in (r"{{(.*?)}}", r"{%-? *(?:el)?if (.*?)%}")
    )
    return filled - conditions | set(re.findall(r'{%-? *include "(.*?)"', template))
