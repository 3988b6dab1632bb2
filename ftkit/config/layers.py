"""Layers of values from several files and options, each value with its origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KeyPath = tuple[str, ...]

COMMAND_LINE = "command line"  # origin of values from the command line


@dataclass(frozen=True)
class Layers:
    """A tree of plain values, and the origin of each key path."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def over(self, below: Layers) -> Layers:
        """Merge this into `below`: mappings are merged recursively, other values replace.

        A mapping with another `kind` replaces the old one; their other keys are not merged. If the command line
        overrides only some keys of a mapping, the mapping keeps its origin, and these keys get the command line's, so
        that a relative path in them is relative to the current folder.
        """
        values = dict(below.values)
        merged: set[KeyPath] = {()}
        replaced: set[KeyPath] = set()
        _merge(values, self.values, (), merged, replaced)
        prefixes = {path: {path[:length] for length in range(len(path) + 1)} for path in below.origins}
        kept = {path: place for path, place in below.origins.items() if prefixes[path].isdisjoint(replaced)}
        typed_through = {path for path in merged if path in kept and self.origins.get(path) == COMMAND_LINE}
        own = {path: place for path, place in self.origins.items() if path not in typed_through}
        return Layers(values, kept | {path: self.origin(path) for path in replaced} | own)

    def value(self, path: KeyPath) -> Any:
        """Return the value at `path`; None if there is none."""
        value: Any = self.values
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def without(self, path: KeyPath) -> Layers:
        origins = {key: place for key, place in self.origins.items() if key[: len(path)] != path}
        return Layers(_without(self.values, path), origins)

    def origin(self, path: KeyPath) -> str:
        """Return the origin of the value at `path`, or of the nearest mapping around it."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins.get(path, "")

    def folder(self, path: KeyPath) -> Path:
        """Return the base of a relative path at `path`: the folder of its file, or the current one."""
        file, _, line = self.origin(path).rpartition(":")
        return Path(file).parent if file and line.isdigit() else Path.cwd()


def _merge(
    values: dict[str, Any], above: Mapping[str, Any], path: KeyPath, merged: set[KeyPath], replaced: set[KeyPath]
) -> None:
    """Merge `above` into `values` in place; record the paths of merged mappings and of replaced values."""
    for key, value in above.items():
        old = dict(kept) if isinstance(kept := values.get(key), Mapping) else None
        if old is not None and isinstance(value, Mapping) and value.get("kind", old.get("kind")) == old.get("kind"):
            merged.add((*path, key))
            _merge(old, value, (*path, key), merged, replaced)
            values[key] = old
        else:
            replaced.add((*path, key))
            values[key] = value


def _without(values: Mapping[str, Any], path: KeyPath) -> dict[str, Any]:
    first, *rest = path
    kept = {key: value for key, value in values.items() if key != first or rest}
    if rest and isinstance(kept.get(first), Mapping):
        kept[first] = _without(kept[first], tuple(rest))
    return kept
