"""What other tools call the keys of a recipe: the tables in `ftkit/other_tools`, one file for each tool."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Final, NamedTuple

from ftkit import assets
from ftkit.config.yaml_files import read_yaml

TOOLS: Final = ("axolotl", "llamafactory", "trl", "torchtune", "unsloth", "automodel")
"""The tools whose configurations `ftkit convert` reads."""
LAUNCHERS: Final = "launchers"
"""The table of files beside a configuration: accelerate's, DeepSpeed's, and LLaMA-Factory's list of datasets."""
_NUMBER: Final = re.compile(r"\[\d+\]")


class Tool(NamedTuple):
    """A tool's names."""

    name: str
    marks: frozenset[str]  # keys, or `key=value`, that only its configurations have
    keys: Mapping[str, str]  # its names, each with a key of a recipe, or the name of a conversion
    reasons: Mapping[str, str]  # its names without a counterpart, each with the reason; they may have `*`
    calls: Mapping[str, list[str]]  # Python functions with configuration, with their positional arguments
    plain: frozenset[str]  # those whose arguments are the tool's own keys
    defaults: Mapping[str, Any]  # what it does if a key is not given, where ftkit does something else

    def find(self, key: str) -> tuple[str, str]:
        """Return what a key of a configuration is here, or the reason why it is nothing; empty texts if unknown."""
        word = _NUMBER.sub("[]", key)
        call, dot, argument = word.partition(".")
        called = call.removesuffix("[]")  # a second call of a function
        words = [word, f"{called}{dot}{argument}", *([argument] if called in self.plain else [])]
        for each in words:
            if each in self.keys:
                return self.keys[each], ""
        patterns = [each for each in self.reasons if any(fnmatchcase(word, each.replace("[", "[[]")) for word in words)]
        return "", self.reasons[max(patterns, key=len)] if patterns else ""


@cache
def read_tool(tool: str) -> Tool:
    """Read the table of a tool, with those that it extends."""
    table = read_yaml(assets.OTHER_TOOLS / f"{tool}.yaml").values
    base = read_tool(table["extends"]) if "extends" in table else Tool("", frozenset(), {}, {}, {}, frozenset(), {})
    keys, reasons = (
        {word: meaning for meaning, words in table.get(part, {}).items() for word in words.split()}
        for part in ("keys", "none")
    )
    return Tool(
        name=table["name"],
        marks=frozenset(table.get("detect", "").split()),
        keys={word: meaning for word, meaning in base.keys.items() if word not in reasons} | keys,
        reasons={word: reason for word, reason in base.reasons.items() if word not in keys} | reasons,
        calls={**base.calls} | {call: str(names or "").split() for call, names in table.get("calls", {}).items()},
        plain=base.plain | frozenset(table.get("same_as", "").split()),
        defaults={**base.defaults, **table.get("defaults", {})},
    )


@cache
def read_values() -> dict[str, Any]:
    """Read the names of values: of optimizers, schedules, attention, templates, and forms of datasets."""
    return dict(read_yaml(assets.OTHER_TOOLS / "values.yaml").values)


def find_name(word: str) -> tuple[str, str]:
    """Return in words what a name of another tool is in a recipe, or why it is nothing; empty if no tool has it."""
    units: dict[str, str] = read_values()["meanings"]
    for tool in ("transformers", *TOOLS):
        key, reason = read_tool(tool).find(word)
        if key or reason:
            return units.get(key, read_values()["values"].get(key, {}).get("key", key)), reason
    return "", ""


def find_value(key: str, word: str) -> str:
    """Return what a value of another tool is for a key of a recipe; empty if no tool has it."""
    tables: dict[str, dict[str, Any]] = read_values()["values"]
    same = [table.get("same", {}) for name, table in tables.items() if table.get("key", name) == key]
    return next((ours for each in same for ours, theirs in each.items() if word.lower() in str(theirs).split()), "")
