"""Read YAML into plain values, each with its line; any other bytes raise a ConfigError.

ruamel parses the syntax. Scalars (YAML 1.2's core schema), anchors and merge keys are resolved here, because ruamel's
loaders have no limits: an alias bomb or a thousand brackets would keep them busy for hours.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from io import StringIO
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

from ftkit.config.layers import COMMAND_LINE, Layers
from ftkit.errors import ConfigError, NotFoundError, Problem, one_line
from ftkit.files import check_regular

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftkit.config.layers import KeyPath

log = logging.getLogger(__name__)

MAX_BYTES: Final = 256 * 1024
MAX_DEPTH: Final = 32
MAX_VALUES: Final = 5_000
"""Maximum keys, items and values of a file, aliases included."""
MAX_DIGITS: Final = 18
"""Maximum digits of an integer: those of 64 bits."""
_LONGEST_SHOWN: Final = 200

_STRING_TAGS: Final = ("!", "tag:yaml.org,2002:str")
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

    Raises:
        NotFoundError: the file can't be read.
        ConfigError: it is not YAML, not a mapping, or beyond the limits of this module.
    """
    log.debug("read %s", path)
    try:
        check_regular(path)  # a pipe without a writer would never open
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = error.strerror or error
        raise NotFoundError(f"can't read {path}: {reason}", fix="check the path and its permissions") from error
    return parse_bytes(data, str(path))


@lru_cache(maxsize=128)  # many recipes extend the same file, and parsing it takes longer than all else
def parse_bytes(data: bytes, where: str) -> Layers:
    """Parse a file's content, as `read_yaml` does; `where` is its name in messages."""
    if len(data) > MAX_BYTES:
        raise _error(where, 1, f"the file is larger than {MAX_BYTES // 1024} KiB.", "Is it the right one?")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise _error(where, line, "not text in UTF-8.", "Save the file as UTF-8.") from error
    return parse_yaml(text, where)


def parse_yaml(text: str, where: str) -> Layers:
    """Parse YAML as `read_yaml` does; `where` is its name in messages."""
    top = _Composer(where).compose(text)
    if top is None or (isinstance(top, _Scalar) and top.value is None):
        return Layers({}, {(): f"{where}:1"})
    if not isinstance(top, _Mapping):
        raise _error(where, top.line, "the file must have 'key: value' lines at the top level.")
    expansion = _Expansion(where)
    return Layers(expansion.plain(top, ()), expansion.origins)


def parse_override(text: str) -> Layers:
    """Parse `key.path=value`.

    A value is a list (`[a, b]`), a mapping (`{a: 1}`) or quoted text, as in YAML; otherwise a single word or text, in
    which only YAML's numbers, `true`, `false` and `null` have a meaning.

    Raises:
        ConfigError: there is no `=`, or the value is not YAML.
    """
    key, separator, value = text.partition("=")
    path = tuple(key.split("."))
    shown = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
    if not separator or not all(path) or not key.isprintable() or len(path) > MAX_DEPTH:
        problem = Problem(
            COMMAND_LINE, repr(shown), "not of the form key.path=value.", "Example: training.learning_rate=1e-5"
        )
        raise ConfigError([problem])
    tree: Any = _typed_value(value, f"{COMMAND_LINE}: {shown}")
    for part in reversed(path):
        tree = {part: tree}
    return Layers(tree, {path[: depth + 1]: COMMAND_LINE for depth in range(len(path))})


def _typed_value(value: str, where: str) -> Any:
    bare = value.strip()
    if bare.startswith(("[", "{", "'", '"')):
        node = _Composer(where).compose(bare)
        return None if node is None else _Expansion(where).plain(node, ())
    text = value if "\n" in value else bare
    _check_text(text, where, None)
    return _scalar(text, where, None)


# --- Scalars -------------------------------------------------------------------------------------


def _scalar(text: str, where: str, line: int | None) -> bool | int | float | str | None:
    """Return the value of an unquoted scalar in YAML 1.2's core schema."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        if len(text) > MAX_DIGITS + 2:
            raise _error(where, line, f"a number of {len(text)} digits is too long.", "Put text in quotes.")
        return int(text, 10 if text[:2] not in ("0o", "0x") else 0)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _check_text(text: str, where: str, line: int | None) -> None:
    """Refuse characters that are illegal in file names, scripts or UTF-8."""
    if "\0" in text:
        raise _error(where, line, "a value can't contain a NUL byte.")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _error(where, line, "the value has half a character (a lone surrogate).", "Write it in UTF-8.")


# --- Nodes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scalar:
    line: int
    value: Any


@dataclass(frozen=True)
class _Sequence:
    line: int
    items: list[_Node]


@dataclass(frozen=True)
class _Mapping:
    """Keys with their lines and values; `merged` are the mappings of its `<<`, the first one winning."""

    line: int
    entries: dict[str, tuple[int, _Node]]
    merged: list[_Mapping]


_Node = _Scalar | _Sequence | _Mapping


class _Composer:
    """Builds nodes from events. An alias is the same node again, which `_Expansion` follows."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._anchors: dict[str, _Node | None] = {}
        self._num_values = 0
        self._depth = 0
        self._line = 1

    def compose(self, text: str) -> _Node | None:
        """Return the document; None if the text has none.

        Raises:
            ConfigError: the text is not YAML, has several documents, or exceeds the limits.
        """
        events = self._events(text)
        documents = [self._node(next(events), events) for event in events if self._begins_document(event)]
        return documents[0] if documents else None

    def _events(self, text: str) -> Iterator[Any]:
        try:
            for event in YAML(typ="safe", pure=True).parse(StringIO(text)):
                self._line = event.start_mark.line + 1
                yield event
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self._line = mark.line + 1 if mark else self._line
            raise self._not_yaml(one_line(error.problem or str(error))) from error
        except ReaderError as error:
            self._line = text.count("\n", 0, error.position) + 1
            raise self._not_yaml("it can't contain control characters") from error
        except (YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
            # Errors that ruamel does not expect: an escape beyond Unicode makes chr() raise an OverflowError.
            raise self._not_yaml(one_line(error)) from error

    def _not_yaml(self, reason: str) -> ConfigError:
        return _error(
            self._where, self._line, f"not valid YAML: {reason[:_LONGEST_SHOWN]}.", "Check indentation and quotes."
        )

    def _begins_document(self, event: Any) -> bool:
        begins = isinstance(event, DocumentStartEvent)
        if begins and self._num_values:
            self._fail("a second document begins here.", "Remove everything after '---'.")
        return begins

    def _node(self, event: Any, events: Iterator[Any]) -> _Node:
        """Build the node that begins with `event`."""
        line = self._line
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            self._fail(f"the file has more than {MAX_VALUES} values.", "Is it the right one?")
        if isinstance(event, AliasEvent):
            return self._aliased(event.anchor)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        node: _Node
        if isinstance(event, ScalarEvent):
            node = _Scalar(line, self._scalar_value(event))
        else:
            if event.tag is not None:
                self._fail(f"the tag {event.tag!r} has no meaning here.", "Leave it out.")
            self._depth += 1
            if self._depth > MAX_DEPTH:
                self._fail(f"lists and mappings are nested more than {MAX_DEPTH} deep.", "Check the brackets.")
            node = self._sequence(events) if isinstance(event, SequenceStartEvent) else self._mapping(events)
            self._depth -= 1
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _aliased(self, name: str) -> _Node:
        node = self._anchors.get(name)
        if node is None:
            reason = "refers to itself" if name in self._anchors else "has no anchor above it"
            self._fail(f"the alias '*{name[:_LONGEST_SHOWN]}' {reason}.", "Put text that begins with '*' in quotes.")
        return node

    def _scalar_value(self, event: Any) -> Any:
        _check_text(event.value, self._where, self._line)
        if event.tag in _STRING_TAGS or (event.tag is None and event.style):
            return str(event.value)
        if event.tag is not None:
            self._fail(f"the tag {event.tag!r} has no meaning here.", "Leave it out; put text in quotes.")
        return _scalar(event.value, self._where, self._line)

    def _sequence(self, events: Iterator[Any]) -> _Sequence:
        line, items = self._line, []
        while not isinstance(event := next(events), SequenceEndEvent):
            items.append(self._node(event, events))
        return _Sequence(line, items)

    def _mapping(self, events: Iterator[Any]) -> _Mapping:
        mapping = _Mapping(self._line, {}, [])
        while not isinstance(event := next(events), MappingEndEvent):
            line, is_merge = self._line, isinstance(event, ScalarEvent) and not event.style and event.value == "<<"
            key = "" if is_merge else self._key(event)
            if key in mapping.entries:
                self._fail(f"'{key}' is given twice, here and on line {mapping.entries[key][0]}.", "Keep one of them.")
            value = self._node(next(events), events)
            if is_merge:
                mapping.merged.extend(self._mappings(value))
            else:
                mapping.entries[key] = (line, value)
        return mapping

    def _key(self, event: Any) -> str:
        if not isinstance(event, ScalarEvent) or event.tag is not None or event.anchor is not None:
            self._fail("a key must be a word.", "Write 'key: value'; put text that begins with [ or { in quotes.")
        key = str(event.value)
        if not key or not key.isprintable() or len(key) > _LONGEST_SHOWN:
            self._fail(f"{key[:_LONGEST_SHOWN]!r} can't be a key.", "A key is a short word.")
        return key

    def _mappings(self, value: _Node) -> list[_Mapping]:
        found = value.items if isinstance(value, _Sequence) else [value]
        mappings = [node for node in found if isinstance(node, _Mapping)]
        if len(mappings) < len(found):
            self._fail("'<<' takes an alias of a mapping, or a list of these.", "Example: <<: *defaults")
        return mappings

    def _fail(self, message: str, fix: str) -> NoReturn:
        raise _error(self._where, self._line, message, fix)


class _Expansion:
    """Converts nodes to plain values, following aliases, and records the line of each key."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._num_values = 0
        self.origins: dict[KeyPath, str] = {}

    def plain(self, node: _Node, path: KeyPath, depth: int = 0) -> Any:
        """Return the value of a node.

        Args:
            node: the node.
            path: keys that lead to it.
            depth: number of lists and mappings around it.

        Raises:
            ConfigError: its aliases exceed the limits.
        """
        self._count(node, 1, depth)
        if isinstance(node, _Scalar):
            return node.value
        if isinstance(node, _Sequence):
            return [self.plain(item, path, depth + 1) for item in node.items]
        self.origins.setdefault(path, f"{self._where}:{node.line}")
        result = {}
        for key, (line, value) in self._entries(node, depth).items():
            self.origins[*path, key] = f"{self._where}:{line}"
            result[key] = self.plain(value, (*path, key), depth + 1)
        return result

    def _entries(self, node: _Mapping, depth: int) -> dict[str, tuple[int, _Node]]:
        """Return a mapping's own entries, and merged entries for other keys."""
        if not node.merged:
            return node.entries
        merged: dict[str, tuple[int, _Node]] = {}
        for other in reversed(node.merged):
            self._count(other, 1 + len(other.entries), depth)
            merged |= self._entries(other, depth + 1)
        return merged | node.entries

    def _count(self, node: _Node, num_values: int, depth: int) -> None:
        self._num_values += num_values
        if self._num_values > MAX_VALUES or depth > MAX_DEPTH:
            raise _error(
                self._where, node.line, f"aliases expand to more than {MAX_VALUES} values here, or nest too deeply.",
                "Write the values out.",
            )  # fmt: skip


def _error(where: str, line: int | None, message: str, fix: str = "") -> ConfigError:
    return ConfigError([Problem(where if line is None else f"{where}:{line}", "", message, fix)])
