"""Values from several places laid over each other, each value remembering where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError

from ftkit.errors import ConfigError, NotFoundError, Problem

KeyPath = tuple[str, ...]

COMMAND_LINE = "command line"
"""The origin of what was typed."""


@dataclass(frozen=True)
class Layers:
    """A tree of plain values, and for each key path the place that it was read from."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def over(self, below: Layers) -> Layers:
        """Lay this over `below`: mappings merge, anything else replaces."""
        return Layers(_merged(below.values, self.values), below.origins | self.origins)

    def without(self, key: str) -> Layers:
        """Leave out one top-level key."""
        return Layers({name: value for name, value in self.values.items() if name != key}, self.origins)

    def origin(self, path: KeyPath) -> str:
        """Return the place of the value at `path`, or of the nearest mapping around it."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins.get(path, "")

    def folder(self, path: KeyPath) -> Path:
        """Return the folder that a relative path at `path` belongs to: its file's, or the current one."""
        file, _, line = self.origin(path).rpartition(":")
        return Path(file).parent if file and line.isdigit() else Path.cwd()


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings, deeply. One of another `kind` replaces the old one: their other keys don't mix."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if (
            isinstance(old, Mapping)
            and isinstance(value, Mapping)
            and value.get("kind", old.get("kind")) == old.get("kind")
        ):
            result[key] = _merged(old, value)
        else:
            result[key] = value
    return result


def read_yaml(path: Path) -> Layers:
    """Read a YAML 1.2 file whose top is a mapping (`1e-5` is a number, `no` a word, no key twice).

    Raises:
        NotFoundError: the file can't be read.
        ConfigError: it is not YAML, or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NotFoundError(f"can't read {path}: {error}", fix="check the path and the rights on it") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, where: str) -> Layers:
    """Parse YAML as `read_yaml` does; `where` names the text in messages."""
    try:
        tree = YAML(typ="rt").load(StringIO(text))
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        first_line = str(error.problem or error).splitlines()[0]
        problem = Problem(f"{where}:{line}", "", f"not valid YAML: {first_line}", "Check indentation and quotes.")
        raise ConfigError([problem]) from error
    if tree is None:
        return Layers()
    if not isinstance(tree, CommentedMap):
        raise ConfigError([Problem(where, "", "the file must hold 'key: value' lines at the top.")])
    origins: dict[KeyPath, str] = {}
    values = _plain(tree, (), where, origins)
    return Layers(values, origins)


def _plain(node: Any, path: KeyPath, where: str, origins: dict[KeyPath, str]) -> Any:
    """Turn ruamel's nodes into plain values, noting each mapping key's line."""
    if isinstance(node, CommentedMap):
        result = {}
        for key, value in node.items():
            inner = (*path, str(key))
            origins[inner] = f"{where}:{node.lc.key(key)[0] + 1}" if key in (node.lc.data or {}) else where
            result[str(key)] = _plain(value, inner, where, origins)
        return result
    if isinstance(node, CommentedSeq):
        return [_plain(value, path, where, origins) for value in node]
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node


def parse_override(text: str) -> Layers:
    """Parse `key.path=value`; the value is YAML, so `1e-5`, `true`, `[a, b]` and `null` mean what they say.

    Raises:
        ConfigError: there is no `=`, or the value is no YAML.
    """
    key, separator, value = text.partition("=")
    path = tuple(key.split("."))
    if not separator or not all(path):
        problem = Problem(
            "command line", text, "not of the form key.path=value.", "Example: training.learning_rate=1e-5"
        )
        raise ConfigError([problem])
    parsed: Any = parse_yaml(f"value: {value}" if "\n" not in value else f"value: {value!r}", f"command line: {text}")
    tree = parsed.values.get("value")
    for part in reversed(path):
        tree = {part: tree}
    return Layers(tree, {path[: depth + 1]: COMMAND_LINE for depth in range(len(path))})
