"""Names of recipe keys in other tools: the tables in `ftkit/other_tools`, one file per tool."""

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
    """The table of a tool."""

    name: str
    marks: frozenset[str]  # keys, or `key=value`, that identify its configurations; with `!`, one alone
    keys: Mapping[str, str]  # its keys, each with a key of a recipe or the name of a conversion
    reasons: Mapping[str, str]  # its keys without a counterpart (`*` is a wildcard), each with the reason
    calls: Mapping[str, list[str]]  # Python functions that configure it, with the names of positional arguments
    plain: frozenset[str]  # functions whose arguments are the tool's own keys
    defaults: Mapping[str, Any]  # values of missing keys, where they differ from ftkit's

    def find(self, key: str) -> tuple[str, str]:
        """Return the counterpart of a key, and otherwise the reason why it has none; empty texts if unknown."""
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
    """Read the table of a tool, with the tables that it extends."""
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
    """Read the names of values: optimizers, schedules, attention, templates, and dataset formats."""
    return dict(read_yaml(assets.OTHER_TOOLS / "values.yaml").values)


def find_name(word: str) -> tuple[str, str]:
    """Describe the counterpart in a recipe of another tool's key, or why there is none; empty if no tool has it."""
    units: dict[str, str] = read_values()["meanings"]
    for tool in ("transformers", *TOOLS):
        key, reason = read_tool(tool).find(word)
        if key or reason:
            return units.get(key, read_values()["values"].get(key, {}).get("key", key)), reason
    return "", ""


def find_value(key: str, word: str) -> str:
    """Return the recipe's counterpart of another tool's value for a key; empty if no tool has it."""
    tables: dict[str, dict[str, Any]] = read_values()["values"]
    same = [table.get("same", {}) for name, table in tables.items() if table.get("key", name) == key]
    return next((ours for each in same for ours, theirs in each.items() if word.lower() in str(theirs).split()), "")
