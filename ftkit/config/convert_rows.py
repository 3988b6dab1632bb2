"""The rows of a conversion, and the resulting recipe.

A key of another tool either has a counterpart in the recipe, to which its value is copied (translated by
`values.yaml`), or is a fact that a rule combines with others, or has a reason why ftkit has no counterpart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from ftkit.config.data_sources import is_inline_template
from ftkit.config.foreign_files import Code
from ftkit.config.layers import Layers
from ftkit.config.objectives import Objective
from ftkit.config.other_tools import LAUNCHERS, Tool, read_tool, read_values
from ftkit.config.problems import validate
from ftkit.config.recipe import RecipeSpec
from ftkit.errors import ConfigError, Problem, redact
from ftkit.paths import is_path
from ftkit.spec import Spec

_PLACEHOLDERS: Final = {"model": "OWNER/MODEL", "data.source": "OWNER/DATASET"}
"""Placeholders for required keys that are not in the input; their rows say so."""
DATASET: Final = "dataset."  # prefix of facts about one dataset
OBJECTIVE: Final = "objective="  # prefix of facts that set an objective
_BNB: Final = re.compile(r"(-unsloth)?-bnb-4bit$")
_NO_BNB: Final = "the model before bitsandbytes: ftkit quantizes it itself, and refuses weights in 4 bits"
_UNKNOWN: Final = "ftkit does not know this key: look it up in the tool's documentation"
ANOTHER: Final = "another key sets this"
AS_HERE: Final = "supervised fine-tuning, as here"
_SUPERVISED: Final = "Convert the configuration of the supervised stage before it."
_CROSS_ENTROPY: Final = re.compile(r"nll|cross_?entropy|^ce(with|$)")
_NO_LENGTH: Final = "null: nothing is truncated there; set training.sequence_length to the longest document's"
_NO_SOUND: Final = "ftkit trains on text and pictures: rows with sound or video are refused"


@dataclass(eq=False)
class Row:
    """A key of the input, or an assumption."""

    file: str
    key: str
    value: Any
    became: str = ""  # key and value in the recipe
    note: str = ""  # the arithmetic, the difference from the tool, or why there is no counterpart
    status: Literal["converted", "changed", "none", "unknown"] = "none"
    is_default: bool = False  # the input does not have the key; the value is the tool's default
    index: int = 0  # number of the dataset in a list that the key belongs to

    def hide_secret(self) -> None:
        """Replace the value by `***` if it has a secret, or the key is named like one."""
        text = f"{self.key}={self.value}"
        if not isinstance(self.value, bool | None) and redact(text, {}) != text:
            self.value = "***"


@dataclass
class Conversion:
    """The recipe under construction, and the rows of all keys."""

    tool: Tool
    recipe: dict[str, Any] = field(default_factory=dict)  # values by dotted key
    rows: list[Row] = field(default_factory=list)
    sources: dict[str, Sequence[Row]] = field(default_factory=dict)
    """The rows from which each key of the recipe was set."""
    facts: dict[str, list[Row]] = field(default_factory=dict)  # the rows that a rule converts
    computed: set[str] = field(default_factory=set)
    """Keys of the recipe whose values the user's program computes: the tool's defaults don't apply."""

    def add_defaults(self) -> None:
        """Add the tool's defaults for missing keys, as if they were given."""
        given = {word for row in self.rows if row.value for word in (row.key, row.key.partition(".")[0])}
        given |= {word for fact in self.facts for word in (fact, fact.partition("=")[0])}
        for name, value in sorted(self.tool.defaults.items(), key=lambda item: "?" not in item[0]):
            needed, _, key = name.rpartition("?")
            target = self._meaning(key)[0]
            target = read_values()["values"].get(target, {}).get("key", target)
            is_set = target in {*self.sources, *self.facts, *self.computed}
            if value is None or is_set or (needed and needed not in given):
                continue
            of = self.recipe.get(value["of"]) if isinstance(value, dict) else None
            shown = round(value["times"] * of, 12) if isinstance(of, int | float) else value
            self.sort(Row("", key, shown, is_default=True), key)

    def _meaning(self, word: str) -> tuple[str, str]:
        target, reason = self.tool.find(word)
        return (target, reason) if target or reason else read_tool(LAUNCHERS).find(word)

    def sort(self, row: Row, word: str) -> None:
        """Copy a value, explain it, or leave it to a rule."""
        target, reason = self._meaning(word)
        call, number = (found[1], int(found[2])) if (found := re.match(r"(\w+)\[(\d+)\]", word)) else (word, 0)
        if call in self.tool.calls and word in {call, f"{call}[{number}]"} and (number or not target):
            return  # a call; its arguments have rows of their own
        self.rows.append(row)
        row.index = row.index or number
        table = read_values()["values"].get(target)
        if number and call in self.tool.calls:
            row.note = f"a later call of {call}: the first one counts"
        elif row.value is None and target != "max_grad_norm":
            is_endless = word.rpartition(".")[2] in {"max_length", "max_seq_len"}  # with other names, it is the default
            self.computed |= {target, "data.too_long"} if is_endless else set()
            row.note = _NO_LENGTH if is_endless else "not set there"
        elif target == "objective":
            self._check_objective(row)
        elif reason or not target:
            row.note, row.status = reason or _UNKNOWN, "none" if reason else "unknown"
        elif target.startswith(DATASET) or ("." not in target and target not in {"name", "model"} and table is None):
            self.facts.setdefault(target, []).append(row)
        elif isinstance(row.value, Code):
            self.computed.add(target)
            row.note = "the program computes it" + ("" if target in self.recipe else f": set {target} yourself")
        elif table is None:
            value = re.sub(_BNB, "", row.value) if target == "model" and isinstance(row.value, str) else row.value
            self.put(target, value, row, note=_NO_BNB * (value != row.value), is_changed=value != row.value)
        else:
            value, row.note = (
                _find_template(row.value, table) if target == "data.chat_template" else _translate(row.value, table)
            )
            if value is not None:
                self.put(table.get("key", target), value, row, note=row.note, is_changed=bool(row.note))

    def _check_objective(self, row: Row) -> None:
        words = [row.key.lower(), *re.findall(r"\w+", str(row.value).lower())]
        if not row.value or not any(re.search(read_values()["other_objectives"], word) for word in words):
            is_multimodal = any(re.search(read_values()["multimodal"], word) for word in words)
            is_other = "loss" in row.key and row.value and not any(_CROSS_ENTROPY.search(word) for word in words[1:])
            row.note = _NO_SOUND if is_multimodal else "ftkit trains with cross-entropy" if is_other else AS_HERE
            row.status = "changed" if is_multimodal else row.status
            return
        row.note = ANOTHER
        names = {known for known, theirs in read_values()["objectives"].items() if {*theirs.split()} & {*words}}
        if len(names) != 1:
            message = f"ftkit's objectives are {', '.join(get_args(Objective))}, and not {row.value!r}."
            raise ConfigError([Problem(row.file, row.key, message, _SUPERVISED)])
        self.facts.setdefault(f"{OBJECTIVE}{names.pop()}", []).append(row)

    def put(self, key: str, value: Any, *rows: Row, note: str = "", is_changed: bool = False) -> None:
        """Set a key of the recipe, unless an earlier row did."""
        was_off = self.sources.get(key) and all(row.value is False for row in self.sources[key])
        if was_off and any(row.value is not False for row in rows):  # a switch that is off selects nothing
            self.remove(key, f"{rows[0].key} sets {key}")
        if key in self.recipe:
            first = self.sources[key][0].key if self.sources[key] else key
            for row in rows:
                row.note = f"{first} sets {key}"
            return
        is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**31
        self.recipe[key], self.sources[key] = int(value) if is_whole else value, rows
        shown = value if isinstance(value, str) else json.dumps(self.recipe[key], ensure_ascii=False)
        for row in rows:
            row.became, row.note, row.status = f"{key}: {shown}", note, "changed" if is_changed else "converted"

    def remove(self, key: str, note: str) -> None:
        """Remove a key of the recipe; `note` is the reason."""
        self.recipe.pop(key, None)
        for row in self.sources.pop(key, ()):
            row.became, row.note, row.status = "", note, "none"

    def take(self, fact: str, note: str = ANOTHER) -> list[Row]:
        """Remove a fact and return its rows; `note` is their note unless the caller puts them."""
        rows = self.facts.pop(fact, [])
        for row in rows:
            row.note = "the program computes it: look the value up" if isinstance(row.value, Code) else note
        return rows

    def number(self, fact: str, note: str = ANOTHER) -> tuple[float | None, list[Row]]:
        """Take a fact; return its first number, and the row of the number."""
        for row in self.take(fact, note):
            if isinstance(row.value, int | float) and not isinstance(row.value, bool) and 0 <= row.value < 2**31:
                return row.value, [row]
        return None, []

    def validated(self, name: str) -> dict[str, Any]:
        """Return the recipe as a tree, without values that ftkit refuses; their rows give the reason."""
        for row in [row for rows in self.facts.values() for row in rows]:
            row.note = row.note or _UNKNOWN
        while True:
            self.recipe.setdefault("name", name)
            self.sources.setdefault("name", ())
            for key, value in _PLACEHOLDERS.items():
                if key not in self.recipe:
                    self.rows.append(Row("", f"({key})", None))
                    self.put(key, value, self.rows[-1], note="not in the input: set it", is_changed=True)
            tree = _nested(self.recipe)
            try:
                validate(RecipeSpec, Layers(tree))
            except ConfigError as error:
                if not sum(map(self._drop, error.problems)):
                    raise
            else:
                return tree

    def _drop(self, problem: Problem) -> bool:
        """Remove the key of a problem; if it has several, the one that comes first in its message."""
        path = re.sub(r"\[\d+\]", "", problem.key)
        near = sorted((key for key in self.recipe if f"{path}.".startswith(f"{key}.")), key=len, reverse=True)
        if not near:
            below = {key: key.removeprefix(path).strip(".").split(".") for key in self.recipe if key.startswith(path)}
            text = problem.message
            places = {key: [text.find(word) for word in words if word in text] for key, words in below.items()}
            near = sorted((key for key in below if places[key]), key=lambda key: min(places[key])) or list(below)
        if near:
            self.remove(near[0], f"ftkit refuses {near[0]}: {problem.message} {problem.fix}".strip())
        return bool(near)


def _translate(value: Any, table: Mapping[str, Any]) -> tuple[Any, str]:
    """Return a value in ftkit's names, and the difference in meaning; the value is None without a counterpart."""
    words = {str(value).lower(), str(value).lower().rpartition(".")[2]}
    for ours, theirs in table["same"].items():
        if words & {str(ours).lower(), *str(theirs).lower().split()}:
            return ours, table.get("but", {}).get(ours, "")
    return table.get("else"), table.get("note", "").format(value=value)


def _find_template(value: object, table: Mapping[str, str]) -> tuple[str | None, str]:
    """Return a chat template: a file or Jinja text as it is, or the name of a shipped one."""
    if value == "jinja":
        return None, "chat_template_jinja is the template"
    text = str(value)
    if is_inline_template(text) or text.endswith((".jinja", ".jinja2", ".j2")):
        return text if is_path(text) or is_inline_template(text) else f"./{text}", ""
    return _translate(value, table)


def _nested(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe as a tree, in the order of RecipeSpec."""
    order: list[str] = []
    for top, field_info in RecipeSpec.model_fields.items():
        kind = field_info.annotation
        keys = kind.model_fields if isinstance(kind, type) and issubclass(kind, Spec) else ()
        order += [top, *(f"{top}.{key}" for key in keys)]
    tree: dict[str, Any] = {}
    is_mapping = any(key.startswith("model.") for key in recipe)
    for key in sorted(recipe, key=lambda key: order.index(".".join(key.split(".")[:2]))):
        *sections, last = ["model", "weights"] if key == "model" and is_mapping else key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = recipe[key]
    return tree
