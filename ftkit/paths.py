"""Paths in user input."""

from __future__ import annotations

import os
from glob import has_magic
from pathlib import Path
from typing import Final

from ftkit.errors import ConfigError, Problem, closest

_LONGEST_PATH: Final = 4095
_LONGEST_NAME: Final = 255
"""Linux's limits, in bytes."""


def is_path(text: str) -> bool:
    """Return whether a text is a path (`/data/model`, `./model`, `~/model`), not a hub id, a name or a keyword."""
    return text.startswith(("/", "./", "../", "~"))


def neighbor_of(path: Path) -> str:
    """Return the question whether a path's neighbor with the most similar name was meant; empty if none is similar."""
    try:
        close = closest(path.name, [each.name for each in path.parent.iterdir()])
    except OSError:
        return ""
    return f"did you mean '{path.parent / close}'? " if close else ""


def is_address(text: str) -> bool:
    """Return whether a text is an address (`s3://bucket/chats.jsonl`), not a path."""
    return "://" in text


def fixed_folder(pattern: str) -> Path:
    """Return the deepest folder without wildcards that contains all files of a path or pattern."""
    path = Path(pattern)
    while any(character in str(path) for character in "*?["):
        path = path.parent
    return path if str(path) != pattern else path.parent


def absolute_path(text: str, folder: Path, where: str = "", key: str = "") -> Path:
    """Make a path absolute: a relative one is relative to `folder`; `~` and `~user` are home folders.

    `..` is resolved, unless it follows a link, where that is another place.

    Raises ConfigError: the path is impossible; the message has `where` and `key`.
    """
    problem = path_problem(text)
    path = folder if problem else (folder / Path(text).expanduser()).absolute()
    problem = problem or path_problem(str(path))  # the folder can be impossible too: plans and scripts are UTF-8
    if problem:
        raise ConfigError([Problem(where, key, f"{problem}.")])
    shorter = os.path.normpath(path)
    return Path(shorter) if os.path.realpath(shorter) == os.path.realpath(path) else path


def is_file(path: Path) -> bool:
    """Return whether a file exists; False for impossible paths."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_pattern(text: str) -> bool:
    """Return whether a path is a pattern (`data/*.jsonl`); a file or folder that has such a name is none."""
    try:
        return has_magic(text) and not Path(text).exists()
    except OSError:
        return True


def path_problem(text: str) -> str | None:
    """Return why a path is impossible; None if it is possible."""
    if not text or not text.isprintable():
        return f"a path is one line of printable characters in UTF-8, got {text[:80]!r}"
    name = max(text.split("/"), key=len)
    if len(os.fsencode(text)) > _LONGEST_PATH or len(os.fsencode(name)) > _LONGEST_NAME:
        return f"a path has at most {_LONGEST_PATH} bytes and each name in it {_LONGEST_NAME}, got {text[:80]}…"
    try:
        Path(text).expanduser()
    except RuntimeError:
        return f"there is no user {text.partition('/')[0].removeprefix('~')!r} on this machine: {text}"
    return None
