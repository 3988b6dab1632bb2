"""Convert pydantic's errors to problems with file, line, key, value and fix."""

from __future__ import annotations

import re
import typing
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeVar, Union

from pydantic import BaseModel, ValidationError

from ftkit.config.layers import COMMAND_LINE, KeyPath, Layers
from ftkit.config.other_tools import find_name, find_value
from ftkit.errors import ConfigError, Problem, closest, plural
from ftkit.spec import attribute_docstrings

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


SpecT = TypeVar("SpecT", bound=BaseModel)


MAX_PROBLEMS: Final = 20  # maximum number of problems shown
_LONGEST_VALUE: Final = 80

_MAPPING_EXPECTED: Final = ("dict_type", "model_attributes_type", "model_type")
_SENTENCES: Final = {
    **dict.fromkeys(("bool_parsing", "bool_type"), ("must be true or false", "")),
    **dict.fromkeys(_MAPPING_EXPECTED, ("must be a mapping", "Write 'key: value' lines below it.")),
    "finite_number": ("must be a finite number", ""),
    **dict.fromkeys(("float_parsing", "float_type"), ("must be a number", "")),
    "greater_than": ("must be more than {gt:g}", ""),
    "greater_than_equal": ("must be at least {ge:g}", ""),
    **dict.fromkeys(("int_from_float", "int_parsing", "int_type"), ("must be a whole number", "")),
    "int_parsing_size": ("must be a whole number of a few digits", ""),
    "less_than": ("must be less than {lt:g}", ""),
    "less_than_equal": ("must be at most {le:,}", ""),
    "string_type": ("must be text", "Put it in quotes."),
    "too_long": ("must have at most {max_length} values", ""),
    "too_short": ("must have at least {min_length}", "Give one, or omit the key."),
    "tuple_type": ("must be a list", "Put it in brackets."),
}
"""Messages for pydantic's error types in the terms of YAML, with fixes."""
_LONGEST_DESCRIPTION: Final = 200


def validate(model: type[SpecT], layers: Layers) -> SpecT:
    """Validate `layers` as a spec. Raises ConfigError with the problems found, each with its origin."""
    try:
        return model.model_validate(layers.values)
    except ValidationError as error:
        # These are consequences of wrong values: a missing default made of other values, or a list that is too short.
        of_values = {each["loc"][:length] for each in error.errors() for length in range(len(each["loc"]))}
        details = [
            each
            for each in error.errors()
            if each["type"] != "default_factory_not_called"
            and (each["type"] != "too_short" or each["loc"] not in of_values)
        ]
        problems = [_problem(model, layers, detail) for detail in details[:MAX_PROBLEMS]]
        if (num_hidden := len(details) - MAX_PROBLEMS) > 0:
            problems.append(Problem("", "", f"{plural(num_hidden, 'more problem')} not shown."))
        raise ConfigError(problems) from error


def _problem(  # noqa: C901 - one case for each form of message
    model: type[BaseModel], layers: Layers, detail: ErrorDetails
) -> Problem:
    path, key, owner = _follow_location(model, detail["loc"])
    where, message, fix = layers.origin(path), "", ""
    kind, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    match kind:
        case "extra_forbidden":
            message = "unknown key."
            fix = _fix_for_unknown_key(path[-1], list(owner.model_fields) if owner else [], model)
        case "missing" if isinstance(detail["loc"][-1], int):
            key, message = key.rpartition("[")[0], f"has too few values, got {_shown(given)}."
        case "missing":
            message, fix = "required, but not given.", f"Add '{path[-1]}:'."
        case "union_tag_not_found":
            kinds = [tag for model in _models_at(owner, path) if (tag := _tag(model))]
            key, message, fix = f"{key}.kind", "required, but not given.", f"Known here: {', '.join(kinds)}."
        case "literal_error" | "union_tag_invalid":
            if kind == "union_tag_invalid":
                where, key = layers.origin((*path, "kind")), f"{key}.kind"
            choices = str(context.get("expected") or context.get("expected_tags"))
            word = str(context.get("tag", given if isinstance(given, str) else _shown(given)))[:_LONGEST_VALUE]
            words = [choice.strip(" '") for choice in choices.replace(" or ", ", ").split(",")]
            shown = word if given is None or isinstance(given, bool) else repr(word)
            message = f"{shown} is none of {choices}."
            fix = _suggestion(find_value(key, word) or word, words) or _description(owner, path)
        case "value_error":
            message = detail["msg"].removeprefix("Value error, ")
            if isinstance(given, dict):
                where = _origin_of_check(layers, path, given, message)
            elif _shown(given) not in message:
                message = f"{message}, got {_shown(given)}"
            message += "."
        case "string_pattern_mismatch":
            message, fix = f"{_shown(given)} does not have the required form.", _description(owner, path)
        case _:
            sentence, fix = _SENTENCES.get(kind, ("can't be this", ""))
            message = f"{sentence.format_map(context)}, got {_shown(given)}."
            own_fix = _fix_for_type(kind, given, key if where == COMMAND_LINE else "", _models_at(owner, path))
            fix = own_fix or ("" if given is None else fix)
            if not fix and not isinstance(given, dict):
                fix = _description(owner, path)
    return Problem(where, key, message, fix)


def _fix_for_type(kind: str, given: object, typed_key: str, models: list[type[BaseModel]]) -> str:
    if typed_key and isinstance(given, dict):  # YAML parsed text in braces as a mapping
        return f"Text that begins with a brace also needs quotes for YAML: {typed_key}='\"{{column}}\"'."
    if kind in _MAPPING_EXPECTED and len(models) == 1:
        return f"Its keys are {', '.join(models[0].model_fields)}."
    if kind == "tuple_type" and isinstance(given, str) and "," not in given:
        return f"Put it in brackets: [{given[:_LONGEST_VALUE]}]."
    return ""


def _models_at(owner: type[BaseModel] | None, path: KeyPath) -> list[type[BaseModel]]:
    """Return the specs that the key at the end of `path` can be."""
    return _models(owner.model_fields[path[-1]].annotation) if owner and path[-1] in owner.model_fields else []


def _description(owner: type[BaseModel] | None, path: KeyPath) -> str:
    """Return a key's description: the first sentences of its docstring, up to the maximum length."""
    text = " ".join(attribute_docstrings(owner).get(path[-1], "").split()) if owner else ""
    if len(text) <= _LONGEST_DESCRIPTION:
        return text
    end = text.rfind(". ", 0, _LONGEST_DESCRIPTION)
    return text[: (text.find(". ") if end < 0 else end) + 1] or text


def _fix_for_unknown_key(word: str, known: list[str], model: type[BaseModel]) -> str:
    name, colon, value = word.partition(":")
    if colon and value and name in known:
        return f"Put a space after the colon: '{name}: {value}'."
    if here := key_here(word, model):
        return f"Here it is {here}."
    if reason := find_name(word)[1]:
        return f"Leave it out: {reason}."
    return _suggestion(word, known) or (f"Known here: {', '.join(sorted(known))}." if known else "")


def key_here(word: str, model: type[BaseModel]) -> str:
    """Return the key of a spec that another tool calls `word`, or that has this name in another section; else empty."""
    return find_name(word)[0] or " or ".join(_paths_to(word, model))


def _paths_to(word: str, model: type[BaseModel], prefix: str = "") -> list[str]:
    found = [f"{prefix}{word}"] if word in model.model_fields else []
    for name, field in model.model_fields.items():
        if len(sections := _models(field.annotation)) == 1:
            found += _paths_to(word, sections[0], f"{prefix}{name}.")
    return found


def words_of_overrides(model: type[BaseModel], prefix: str = "") -> dict[str, list[str]]:
    """Return the dotted keys below a spec, each with its possible words; empty if the key takes other values too."""
    found: dict[str, list[str]] = {}
    for name, field in model.model_fields.items():
        sections = _models(field.annotation)
        if len(sections) == 1 and sections[0] is not model:
            found |= words_of_overrides(sections[0], f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = _words(field.annotation)
    return found


def _words(annotation: object) -> list[str]:
    if annotation is bool:
        return ["true", "false"]
    if typing.get_origin(annotation) is Literal:
        return [str(word) for word in typing.get_args(annotation)]
    is_open = typing.get_origin(annotation) not in (Annotated, Union, UnionType)
    return [] if is_open else [word for part in typing.get_args(annotation) for word in _words(part)]


def _origin_of_check(layers: Layers, path: KeyPath, given: dict[str, object], message: str) -> str:
    """Return the origin of a problem with several keys: prefer keys in the message, and among these typed ones."""
    named = [(*path, key) for key in given if re.search(rf"\b{re.escape(key)}\b", message)]
    places = [layers.origins[key] for key in named if key in layers.origins]
    return COMMAND_LINE if COMMAND_LINE in places else next(iter(places), layers.origin(path))


def _shown(value: object) -> str:
    """Format a value in YAML's spelling, shortened if it is long."""
    words = {None: "null", True: "true", False: "false"}
    shown = words[value] if value is None or isinstance(value, bool) else repr(value)
    return shown if len(shown) <= _LONGEST_VALUE else f"{shown[:_LONGEST_VALUE]}…"


def _suggestion(word: str, known: list[str]) -> str:
    close = closest(word, known)
    return f"Did you mean '{close}'?" if close else ""


def _follow_location(
    model: type[BaseModel], location: tuple[int | str, ...]
) -> tuple[KeyPath, str, type[BaseModel] | None]:
    """Return the user's key path without union tags and indices; the path as text with indices; and its last model."""
    path: list[str] = []
    shown = ""
    owner: type[BaseModel] | None = model
    candidates = [model]
    for part in location:
        tagged = [candidate for candidate in candidates if len(candidates) > 1 and _tag(candidate) == part]
        if tagged:
            candidates = tagged
            continue
        if isinstance(part, int) or part == "[key]":  # pydantic's name for the key of a mapping, which precedes it
            shown += f"[{part}]" if isinstance(part, int) else ""
            continue
        owner = candidates[0] if len(candidates) == 1 else None
        path.append(part)
        shown += f".{part}"
        field = owner.model_fields.get(part) if owner else None
        candidates = _models(field.annotation) if field else []
    return tuple(path), shown.removeprefix("."), owner


def _tag(model: type[BaseModel]) -> str | None:
    kind = model.model_fields.get("kind")
    values = typing.get_args(kind.annotation) if kind and typing.get_origin(kind.annotation) is Literal else ()
    return str(values[0]) if values else None


def _models(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _models(typing.get_args(annotation)[0])
    if origin in (Union, UnionType, tuple, list):
        return [model for part in typing.get_args(annotation) for model in _models(part)]
    return []
