"""Values from several places laid over each other, each value remembering where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KeyPath = tuple[str, ...]

COMMAND_LINE = "command line"
"""The origin of what was typed."""


@dataclass(frozen=True)
class Layers:
    """A tree of plain values, and for each key path the place that it was read from."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def over(self, below: Layers) -> Layers:
        """Lay this over `below`: mappings merge, deeply, and anything else replaces.

        A mapping of another `kind` replaces the old one: their other keys don't mix. A mapping that was only typed
        through, on the way to a key in it, stays where it was.
        """
        values = dict(below.values)
        merged: set[KeyPath] = {()}
        replaced: set[KeyPath] = set()
        _merge(values, self.values, (), merged, replaced)
        kept = {path: place for path, place in below.origins.items() if not _is_within(path, replaced)}
        typed_through = {path for path in merged if path in kept and self.origins.get(path) == COMMAND_LINE}
        own = {path: place for path, place in self.origins.items() if path not in typed_through}
        return Layers(values, kept | own)

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


def _merge(
    values: dict[str, Any], above: Mapping[str, Any], path: KeyPath, merged: set[KeyPath], replaced: set[KeyPath]
) -> None:
    """Lay `above` over `values`, in place; note the paths of mappings that were merged, and of what was replaced."""
    for key, value in above.items():
        inner, old = (*path, key), values.get(key)
        if (
            isinstance(old, Mapping)
            and isinstance(value, Mapping)
            and value.get("kind", old.get("kind")) == old.get("kind")
        ):
            values[key] = dict(old)
            merged.add(inner)
            _merge(values[key], value, inner, merged, replaced)
        else:
            values[key] = value
            replaced.add(inner)


def _is_within(path: KeyPath, others: set[KeyPath]) -> bool:
    return any(path[:length] in others for length in range(len(path) + 1))
