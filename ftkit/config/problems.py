"""Convert pydantic's errors to problems with file, line, key, value and fix."""

from __future__ import annotations

import difflib
import re
import typing
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeVar, Union

from pydantic import BaseModel, ValidationError

from ftkit.config.layers import COMMAND_LINE
from ftkit.errors import ConfigError, Problem, plural
from ftkit.spec import attribute_docstrings

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from ftkit.config.layers import KeyPath, Layers

SpecT = TypeVar("SpecT", bound=BaseModel)


MAX_PROBLEMS: Final = 20
"""Maximum number of problems shown: more add little."""
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
_KEYS_OF_OTHER_TOOLS: Final = {
    "base_model": "model",
    "batch_size": "training.global_batch_size",
    "cutoff_len": "training.sequence_length",
    "dataset": "data.source",
    "datasets": "data.source",
    "epochs": "training.num_epochs",
    "eval_steps": "evaluation.every_steps",
    "gradient_accumulation_steps": "training.global_batch_size, from which accumulation follows",
    "gradient_checkpointing": "training.activation_checkpointing",
    "load_in_4bit": "training.method: qlora",
    "logging_steps": "training.log_every_steps",
    "lora_alpha": "training.lora.alpha",
    "lora_dropout": "training.lora.dropout",
    "lora_r": "training.lora.rank",
    "lora_rank": "training.lora.rank",
    "lora_target": "training.lora.targets",
    "lora_target_modules": "training.lora.targets",
    "lr": "training.learning_rate",
    "lr_scheduler": "training.schedule",
    "lr_scheduler_type": "training.schedule",
    "max_length": "training.sequence_length",
    "max_seq_length": "training.sequence_length",
    "model_name_or_path": "model",
    "num_train_epochs": "training.num_epochs",
    "per_device_train_batch_size": "training.micro_batch_size",
    "r": "training.lora.rank",
    "sample_packing": "data.packing",
    "save_steps": "training.checkpoint_every_steps",
    "save_total_limit": "training.keep_checkpoints",
    "sequence_len": "training.sequence_length",
    "target_modules": "training.lora.targets",
    "train_on_inputs": "data.train_on: all",
    "val_set_size": "data.validation",
    "warmup_steps": "training.warmup_ratio, a fraction of all steps",
}
"""Keys of Axolotl, LLaMA-Factory and TRL, with their equivalents here."""
_NO_REMOTE_CODE: Final = (
    "ftkit never runs code that comes with a model: choose one whose model_type is in transformers itself."
)
_LONGEST_DESCRIPTION: Final = 200


def validate(model: type[SpecT], layers: Layers) -> SpecT:
    """Validate `layers` as a spec.

    Raises:
        ConfigError: with the problems found, each with its origin.
    """
    try:
        return model.model_validate(layers.values)
    except ValidationError as error:
        details = _without_consequences(error.errors())
        problems = [_problem(model, layers, detail) for detail in details[:MAX_PROBLEMS]]
        if (num_hidden := len(details) - MAX_PROBLEMS) > 0:
            problems.append(Problem("", "", f"{plural(num_hidden, 'more problem')} not shown."))
        raise ConfigError(problems) from error


def _without_consequences(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Leave out lists that are too short only because pydantic counts their valid values."""
    of_values = {detail["loc"][:length] for detail in details for length in range(len(detail["loc"]))}
    return [detail for detail in details if detail["type"] != "too_short" or detail["loc"] not in of_values]


def _problem(  # noqa: PLR0911 - one for each form of message
    model: type[BaseModel], layers: Layers, detail: ErrorDetails
) -> Problem:
    path, key, owner = _follow_location(model, detail["loc"])
    where = layers.origin(path)
    kind, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        known = list(owner.model_fields) if owner else []
        return Problem(where, key, "unknown key.", _fix_for_unknown_key(path[-1], known))
    if kind == "missing" and isinstance(detail["loc"][-1], int):
        return Problem(where, key.rpartition("[")[0], f"has too few values, got {_shown(given)}.")
    if kind == "missing":
        return Problem(where, key, "required, but not given.", f"Add '{path[-1]}:'.")
    if kind == "union_tag_not_found":
        kinds = [tag for model in _models_at(owner, path) if (tag := _tag(model))]
        return Problem(where, f"{key}.kind", "required, but not given.", f"Known here: {', '.join(kinds)}.")
    if kind in {"literal_error", "union_tag_invalid"}:
        if kind == "union_tag_invalid":
            where, key = layers.origin((*path, "kind")), f"{key}.kind"
        choices = str(context.get("expected") or context.get("expected_tags"))
        word = str(context.get("tag", given if isinstance(given, str) else _shown(given)))[:_LONGEST_VALUE]
        words = [choice.strip(" '") for choice in choices.replace(" or ", ", ").split(",")]
        fix = _suggestion(word, words, listing=False) or _description(owner, path)
        shown = word if given is None or isinstance(given, bool) else repr(word)
        return Problem(where, key, f"{shown} is none of {choices}.", fix)
    message = detail["msg"].removeprefix("Value error, ")
    if kind == "value_error" and isinstance(given, dict):
        return Problem(_origin_of_check(layers, path, given, message), key, f"{message}.")
    if kind == "value_error":
        shown = _shown(given)
        return Problem(where, key, f"{message}." if shown in message else f"{message}, got {shown}.")
    if kind == "string_pattern_mismatch":
        form = f"{_shown(given)} does not have the required form."
        return Problem(where, key, form, _description(owner, path))
    return _wrong_value(where, path, key, owner, detail)


def _wrong_value(where: str, path: KeyPath, key: str, owner: type[BaseModel] | None, detail: ErrorDetails) -> Problem:
    """Return the problem of a value of the wrong type or size; the default fix is the key's description."""
    kind, given = detail["type"], detail["input"]
    message, fix = _SENTENCES.get(kind, ("can't be this", ""))
    if where == COMMAND_LINE and isinstance(given, dict):  # YAML parsed text in braces as a mapping
        fix = f"Text that begins with a brace also needs quotes for YAML: {key}='\"{{column}}\"'."
    elif kind in _MAPPING_EXPECTED and len(models := _models_at(owner, path)) == 1:
        fix = f"Its keys are {', '.join(models[0].model_fields)}."
    elif kind == "tuple_type" and isinstance(given, str) and "," not in given:
        fix = f"Put it in brackets: [{given[:_LONGEST_VALUE]}]."
    elif given is None or not fix:
        fix = "" if isinstance(given, dict) else _description(owner, path)
    return Problem(where, key, f"{message.format_map(detail.get('ctx', {}))}, got {_shown(given)}.", fix)


def _models_at(owner: type[BaseModel] | None, path: KeyPath) -> list[type[BaseModel]]:
    """Return the specs that the key at the end of `path` can be."""
    return _models(owner.model_fields[path[-1]].annotation) if owner and path[-1] in owner.model_fields else []


def _description(owner: type[BaseModel] | None, path: KeyPath) -> str:
    """Return a key's description: as many first sentences of its docstring as fit into a message."""
    text = " ".join(attribute_docstrings(owner).get(path[-1], "").split()) if owner else ""
    if len(text) <= _LONGEST_DESCRIPTION:
        return text
    end = text.rfind(". ", 0, _LONGEST_DESCRIPTION)
    return text[: (text.find(". ") if end < 0 else end) + 1] or text


def _fix_for_unknown_key(word: str, known: list[str]) -> str:
    if word == "trust_remote_code":
        return _NO_REMOTE_CODE
    name, colon, value = word.partition(":")
    if colon and value and name in known:
        return f"Put a space after the colon: '{name}: {value}'."
    here = _KEYS_OF_OTHER_TOOLS.get(word)
    return f"Here it is {here}." if here else _suggestion(word, known)


def _origin_of_check(layers: Layers, path: KeyPath, given: dict[str, object], message: str) -> str:
    """Return the origin of a problem with several keys: prefer a key in the message, and of these a typed one."""
    named = [(*path, key) for key in given if re.search(rf"\b{re.escape(key)}\b", message)]
    places = [layers.origins[key] for key in named if key in layers.origins]
    return COMMAND_LINE if COMMAND_LINE in places else next(iter(places), layers.origin(path))


def _shown(value: object) -> str:
    """Format a value in YAML's spelling, shortened if it is long."""
    words = {None: "null", True: "true", False: "false"}
    shown = words[value] if value is None or isinstance(value, bool) else repr(value)
    return shown if len(shown) <= _LONGEST_VALUE else f"{shown[:_LONGEST_VALUE]}…"


def _suggestion(word: str, known: list[str], *, listing: bool = True) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"Did you mean '{close[0]}'?"
    return f"Known here: {', '.join(sorted(known))}." if listing and known else ""


def _follow_location(
    model: type[BaseModel], location: tuple[int | str, ...]
) -> tuple[KeyPath, str, type[BaseModel] | None]:
    """Follow an error's location.

    Returns:
        The user's key path, without union tags and indices; the same as text, with indices; and the model that owns its
        end.
    """
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
