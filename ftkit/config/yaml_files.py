"""Read YAML into plain values, each with its line; any other bytes raise a ConfigError.

ruamel composes the nodes within limits: an alias bomb or a thousand nested brackets would take it hours. Scalars follow
YAML 1.2's core schema, in which a date is text.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, ScalarEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from ftkit.config.layers import COMMAND_LINE, KeyPath, Layers
from ftkit.errors import ConfigError, NotFoundError, Problem, one_line
from ftkit.files import open_regular

log = logging.getLogger(__name__)

MAX_BYTES: Final = 256 * 1024
MAX_DEPTH: Final = 32
MAX_VALUES: Final = 5_000  # maximum items and values of a file, aliases expanded
MAX_DIGITS: Final = 18  # maximum digits of an integer: those of 64 bits
_LONGEST_SHOWN: Final = 200

_STRING_TAGS: Final = ("!", "tag:yaml.org,2002:str")
_MERGE_TAG: Final = "tag:yaml.org,2002:merge"
_WORDS: Final = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER: Final = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT: Final = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


def read_yaml(path: Path) -> Layers:
    """Read a YAML 1.2 file whose top is a mapping (`1e-5` is a number, `no` a word, no key twice).

    Raises NotFoundError: the file can't be read; ConfigError: it is not YAML, not a mapping, or beyond the limits of
    this module.
    """
    log.debug("read %s", path)
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = error.strerror or error
        raise NotFoundError(f"can't read {path}: {reason}", fix="check the path and its permissions") from error
    return parse_bytes(data, str(path))


@lru_cache(maxsize=128)  # many recipes extend the same file, and parsing it dominates
def parse_bytes(data: bytes, where: str) -> Layers:
    """Parse a file's content, as `read_yaml` does; `where` is its name in messages."""
    if len(data) > MAX_BYTES:
        raise _error(where, 1, f"the file is larger than {MAX_BYTES // 1024} KiB.", "Is it the right one?")
    try:
        return parse_yaml(data.decode("utf-8-sig"), where)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise _error(where, line, "not text in UTF-8.", "Save the file as UTF-8.") from error


def parse_yaml(text: str, where: str) -> Layers:
    """Parse YAML as `read_yaml` does; `where` is its name in messages."""
    origins: dict[KeyPath, str] = {}
    values = _parse(text, where, origins)
    if values is None:
        return Layers({}, {(): f"{where}:1"})
    if not isinstance(values, dict):
        raise _error(where, 1, "the file must have 'key: value' lines at the top level.")
    return Layers(values, origins)


def to_yaml(document: Mapping[str, Any]) -> str:
    yaml, text = YAML(), StringIO()
    yaml.width = 200
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.dump(document, text)
    return text.getvalue()


def parse_override(text: str) -> Layers:
    """Parse `key.path=value`.

    A value is a list (`[a, b]`), a mapping (`{a: 1}`) or quoted text, as in YAML. Any other value is plain text, in
    which only YAML's numbers, `true`, `false` and `null` are special. Raises ConfigError: there is no `=`, or the value
    is not YAML.
    """
    key, separator, value = text.partition("=")
    path = tuple(key.split("."))
    shown = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
    if not separator or not all(path) or not key.isprintable() or len(path) > MAX_DEPTH:
        fix = "Example: training.learning_rate=1e-5"
        raise ConfigError([Problem(COMMAND_LINE, repr(shown), "not of the form key.path=value.", fix)])
    where, bare = f"{COMMAND_LINE}: {shown}", value.strip()
    tree: object
    if bare.startswith(("[", "{", "'", '"')):
        tree = _parse(bare, where, {})
    else:
        tree = _scalar(value if "\n" in value else bare, where, None)
    for part in reversed(path[1:]):
        tree = {part: tree}
    return Layers({path[0]: tree}, {path[: depth + 1]: COMMAND_LINE for depth in range(len(path))})


# --- Scalars -------------------------------------------------------------------------------------


def _scalar(text: str, where: str, line: int | None, *, is_text: bool = False) -> bool | int | float | str | None:
    """Return the value of a scalar by YAML 1.2's core schema, or the text of a quoted scalar."""
    if "\0" in text:  # illegal in file names and scripts, as surrogates are in UTF-8
        raise _error(where, line, "a value can't contain a NUL byte.")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _error(where, line, "the value has half a character (a lone surrogate).", "Write it in UTF-8.")
    if is_text:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        if len(text) > MAX_DIGITS + 2:
            raise _error(where, line, f"a number of {len(text)} digits is too long.", "Put text in quotes.")
        return int(text, 10 if text[:2] not in ("0o", "0x") else 0)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


# --- Nodes ---------------------------------------------------------------------------------------


class _LimitedComposer(Composer):
    """ruamel's composer of nodes, with limits. An alias repeats its node, which counts for each use."""

    where = ""
    line = 1
    num_values = nesting = deepest = 0
    sizes: dict[int, tuple[int, int]]
    """Number of values in each complete node and of levels below it, by the node's id."""

    def compose_node(self, parent: Node | None, index: object) -> Node | None:
        """Compose the next node, unless it exceeds a limit, or has a tag."""
        event = self.parser.peek_event()
        self.line = event.start_mark.line + 1
        values_before, deepest_before = self.num_values, self.deepest
        is_key = index is None and isinstance(parent, MappingNode)
        self.num_values += not is_key
        self.nesting += 1
        self.deepest = self.nesting
        self._check_limits()
        node: Node | None
        if isinstance(event, AliasEvent):
            node = super().compose_node(parent, index)
            num_values, levels = self.sizes.get(id(node), (MAX_VALUES, MAX_DEPTH))  # unknown: the node contains itself
            self.num_values += num_values
            self.deepest += levels
            self._check_limits()
        else:
            tag = event.tag
            if tag is not None and not (tag in _STRING_TAGS and isinstance(event, ScalarEvent)):
                reason = f"the tag {str(tag)!r} has no meaning here."
                raise _error(self.where, self.line, reason, "Leave it out; put text in quotes.")
            node = super().compose_node(parent, index)
            self.sizes[id(node)] = (self.num_values - values_before, self.deepest - self.nesting)
            if isinstance(node, ScalarNode) and tag is not None:
                node.style = "'"  # like text in quotes
        self.nesting -= 1
        self.deepest = max(self.deepest, deepest_before)
        return node

    def _check_limits(self) -> None:
        if self.num_values > MAX_VALUES or self.deepest > MAX_DEPTH + 1:
            reason = f"more than {MAX_VALUES} values with aliases expanded, or lists nested more than {MAX_DEPTH} deep."
            raise _error(self.where, self.line, reason, "Check the brackets; write aliases out.")


def _parse(text: str, where: str, origins: dict[KeyPath, str]) -> object:
    """Return the value of a text's only document, None if there is none; record the origin of each key.

    Raises ConfigError: not YAML, several documents, duplicate keys, keys that are no short words, or a limit exceeded.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _LimitedComposer
    composer: _LimitedComposer = yaml.composer
    composer.where, composer.sizes, composer.warn_double_anchors = where, {}, False
    try:
        top: Node | None = yaml.compose(StringIO(text))
    except (YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        # Also errors that ruamel does not expect: an escape beyond Unicode makes chr() raise an OverflowError.
        line, reason = composer.line, str(error)
        if isinstance(error, MarkedYAMLError):
            mark = error.problem_mark or error.context_mark
            line, reason = (mark.line + 1 if mark else line), error.problem or reason
        elif isinstance(error, ReaderError):
            line, reason = text.count("\n", 0, error.position) + 1, "it can't contain control characters"
        raise _error(where, line, f"not valid YAML: {one_line(reason)}.", "Check indentation and quotes.") from error
    return None if top is None else _plain(top, (), where, origins)


def _plain(node: Node, path: KeyPath, where: str, origins: dict[KeyPath, str]) -> object:
    line = node.start_mark.line + 1
    if isinstance(node, ScalarNode):
        return _scalar(str(node.value), where, line, is_text=bool(node.style))
    if isinstance(node, SequenceNode):
        return [_plain(item, path, where, origins) for item in node.value]
    origins.setdefault(path, f"{where}:{line}")
    result: dict[str, object] = {}
    for key, (key_line, value) in _entries(node, where).items():
        origins[*path, key] = f"{where}:{key_line}"
        result[key] = _plain(value, (*path, key), where, origins)
    return result


def _entries(mapping: Node, where: str) -> dict[str, tuple[int, Node]]:
    """Return a mapping's entries with their lines: its own, then those of its `<<` mappings; the first one wins."""
    own: dict[str, tuple[int, Node]] = {}
    merged: dict[str, tuple[int, Node]] = {}
    for key_node, value in mapping.value:
        key, line = key_node.value, key_node.start_mark.line + 1
        if key_node.tag == _MERGE_TAG:
            for other in value.value if isinstance(value, SequenceNode) else [value]:
                if not isinstance(other, MappingNode):
                    raise _error(where, line, "'<<' takes an alias of a mapping, or a list.", "Example: <<: *defaults")
                merged = _entries(other, where) | merged
            continue
        if not isinstance(key_node, ScalarNode):
            advice = "Write 'key: value'; put text that begins with [ or { in quotes."
            raise _error(where, line, "a key must be a word.", advice)
        if not key or not key.isprintable() or len(key) > _LONGEST_SHOWN:
            raise _error(where, line, f"{key[:_LONGEST_SHOWN]!r} can't be a key.", "A key is a short word.")
        if key in own:
            raise _error(where, line, f"'{key}' is given twice, here and on line {own[key][0]}.", "Keep one of them.")
        own[key] = line, value
    return merged | own


def _error(where: str, line: int | None, message: str, fix: str = "") -> ConfigError:
    return ConfigError([Problem(where if line is None else f"{where}:{line}", "", message, fix)])
