"""Fill in the templates of job scripts.

Every value in a script passes through one of the filters below: Jinja refuses a value without a filter. A file in a
project's `sbatch/` folder overrides the shipped template of the same name.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import traceback
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Final

from jinja2 import BaseLoader, BytecodeCache, Environment, StrictUndefined, TemplateNotFound, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ftkit import assets
from ftkit.config.context import cache_folder
from ftkit.errors import ConfigError, Problem, one_line
from ftkit.files import read_small, write_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from jinja2.bccache import Bucket


OVERRIDDEN_PARTS: Final = "overridden_parts"
"""Key of a run's manifest: the parts that the project overrides in its job scripts, each with its SHA-256."""


def fill(template: str, project: Path | None, /, **values: object) -> str:
    """Fill in a template.

    Args:
        template: name of the template.
        project: folder whose `sbatch/` overrides templates; only shipped ones if null.
        values: the template's variables.

    Raises:
        ConfigError: a value can't be expressed for Slurm or bash, or there is an error in a project's own part. Errors
            in shipped templates are bugs, and raised unchanged.
    """
    try:
        return _environment(project).get_template(template).render(values)
    except (TemplateError, TypeError) as error:
        if project is None or not (overrides := find_overrides(project)):
            raise
        name, line, is_ours = ", ".join(overrides), None, True
        own = {str(project / "sbatch" / each): each for each in overrides}
        for frame in traceback.extract_tb(error.__traceback__):  # the last part is the innermost one
            if frame.filename in own:
                name, line, is_ours = own[frame.filename], frame.lineno, False
            elif frame.filename == __file__:  # a filter, called by a template
                is_ours = True
        if isinstance(error, TypeError) and is_ours:
            raise
        line = getattr(error, "lineno", line)
        name = getattr(error, "name", None) or name
        what = "uses what templates may not" if isinstance(error, SecurityError) else "can't be filled in"
        fix = f"Compare it with the shipped part in {assets.JOB_TEMPLATES}, or remove it."
        where = f"sbatch/{name}{f', line {line}' if line else ''}"
        raise ConfigError([Problem("", where, f"{what}: {one_line(error)}.", fix)]) from error


@cache
def _environment(project: Path | None) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        loader=_PartLoader(project),
        bytecode_cache=_CompiledTemplates(cache_folder(os.environ) / "templates"),
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


# --- Filters -------------------------------------------------------------------------------------


class _Safe(str):
    """Text that passed through a filter."""

    __slots__ = ()


def quote_word(value: object) -> str:
    """Quote any value as one word of bash."""
    text = str(value)
    if "\0" in text:
        raise ConfigError([Problem("", "", f"scripts and variables can't contain a NUL byte: {text!r}.")])
    return _Safe(shlex.quote(text))


def quote_directive(value: object) -> str:
    """Quote a value for an #SBATCH line, which sbatch parses by its own rules.

    Old and new releases agree on double quotes, in which a backslash makes the next character an ordinary one;
    `#` would begin a comment even there.
    """
    text = str(value)
    if any(ord(character) < ord(" ") or character == "\x7f" for character in text):
        raise ConfigError([Problem("", "", f"an #SBATCH line can't contain control characters: {text!r}.")])
    if text and shlex.quote(text) == text:
        return _Safe(text)
    escaped = "".join("\\" + character if character in '\\"#' else character for character in text)
    return _Safe(f'"{escaped}"')


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
    """Pass text that already is bash unchanged, such as the lines of a site's profile."""
    return _Safe(value)


def _refuse_unfiltered(value: object) -> str:
    if not isinstance(value, _Safe):
        raise TemplateError(f"a template prints {value!r} without a filter")
    return value


class _CompiledTemplates(BytecodeCache):
    """Caches the bytecode of templates in the user's cache folder, because compiling takes a tenth of a second.

    Jinja compares the digest of a template's source, and compiles the template again if it differs. Without a writable
    folder, templates are compiled each time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load_bytecode(self, bucket: Bucket) -> None:
        """Read a template's bytecode, if it is cached."""
        with suppress(OSError):
            bucket.bytecode_from_string((self._folder / bucket.key).read_bytes())

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Write a template's bytecode."""
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_file(self._folder / bucket.key, bucket.bytecode_to_string())


# --- A project's own parts -----------------------------------------------------------------------


def find_overrides(project: Path) -> dict[str, str]:
    """Return the shipped templates that a project overrides, such as `parts/run.sh.j2`, with the override's SHA-256.

    Raises:
        ConfigError: a part can't be read.
    """
    names = sorted(str(path.relative_to(assets.JOB_TEMPLATES)) for path in assets.JOB_TEMPLATES.rglob("*.j2"))
    found = {name: _override(project, name) for name in names}
    return {name: hashlib.sha256(_read(path).encode()).hexdigest() for name, path in found.items() if path}


def _override(project: Path | None, name: str) -> Path | None:
    if project is None:
        return None
    folder = project / "sbatch"
    if not os.path.lexists(folder / name) or folder.resolve() == assets.JOB_TEMPLATES.resolve():  # ftkit's own checkout
        return None
    return folder / name


class _PartLoader(BaseLoader):
    """Loads a template from a project's `sbatch/` folder if it overrides the shipped one of that name."""

    def __init__(self, project: Path | None) -> None:
        self._project = project

    def get_source(self, environment: Environment, template: str) -> tuple[str, str, Callable[[], bool]]:
        """Return a template's text, its path, and whether that text is still current.

        Raises:
            ConfigError: the project's part can't be read, or lacks a placeholder that the shipped part always fills in.
            TemplateNotFound: there is no template of that name.
        """
        shipped = assets.JOB_TEMPLATES / template
        if ".." in template or not shipped.is_file():
            raise TemplateNotFound(template)
        text = shipped.read_text(encoding="utf-8")
        path = _override(self._project, template)
        if path is None:
            return text, str(shipped), lambda: _override(self._project, template) is None
        own = _read(path)
        _check_placeholders(environment, template, own, text)
        return own, str(path), lambda: False


def _read(path: Path) -> str:
    try:
        return read_small(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("", str(path), f"can't be read: {one_line(error)}.")]) from error


def _check_placeholders(environment: Environment, template: str, own: str, shipped: str) -> None:
    needed = set(_placeholders(environment.parse(shipped)))
    left = set(_placeholders(environment.parse(own, template)))
    if lost := sorted(needed - left):
        what = f"lacks placeholders of the part it overrides: {', '.join(lost)}."
        fix = "Copy the lines that have them from the shipped part, or remove the file."
        raise ConfigError([Problem("", f"sbatch/{template}", what, fix)])


def _placeholders(node: nodes.Node) -> Iterator[str]:
    """Yield the dotted names that a template fills in, and the parts that it includes.

    Names in conditions are omitted, and what is filled in only if it is set: a site without accounts needs no account.
    """
    if isinstance(node, nodes.If):
        optional = set(_placeholders(node.test))
        for child in (*node.body, *node.elif_, *node.else_):
            yield from (name for name in _placeholders(child) if name not in optional)
        return
    if isinstance(node, nodes.Include) and isinstance(node.template, nodes.Const):
        yield f"include {node.template.value}"
    name = _dotted(node)
    if "." in name:
        yield name
        return
    for child in node.iter_child_nodes():
        yield from _placeholders(child)


def _dotted(node: nodes.Node) -> str:
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Getattr):
        base = _dotted(node.node)
        return f"{base}.{node.attr}" if base else ""
    return ""
