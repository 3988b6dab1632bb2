"""From pydantic's errors to problems that name file, line, key, value and what to do."""

from __future__ import annotations

import difflib
import typing
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union

from pydantic import BaseModel, ValidationError

from ftkit.errors import ConfigError, Problem

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from ftkit.specs.layers import KeyPath, Layers

SpecT = TypeVar("SpecT", bound=BaseModel)


def validate(model: type[SpecT], layers: Layers) -> SpecT:
    """Check `layers` against a spec.

    Raises:
        ConfigError: with every problem found, each with the place that it came from.
    """
    try:
        return model.model_validate(layers.values)
    except ValidationError as error:
        raise ConfigError([_problem(model, layers, detail) for detail in error.errors()]) from error


def _problem(model: type[BaseModel], layers: Layers, detail: ErrorDetails) -> Problem:
    path, owner = _walk(model, detail["loc"])
    where, key = layers.origin(path), ".".join(path)
    kind = detail["type"]
    if kind == "extra_forbidden":
        return Problem(where, key, "unknown key.", _suggestion(path[-1], list(owner.model_fields) if owner else []))
    if kind == "missing":
        return Problem(where, key, "required, but not given.", f"Add '{path[-1]}:'.")
    message = detail["msg"].removeprefix("Value error, ")
    if kind in {"literal_error", "union_tag_invalid"}:
        choices = str(detail.get("ctx", {}).get("expected") or detail.get("ctx", {}).get("expected_tags"))
        given = str(detail.get("ctx", {}).get("tag", detail["input"]))
        known = [choice.strip(" '") for choice in choices.replace(" or ", ", ").split(",")]
        return Problem(where, key, f"'{given}' is none of {choices}.", _suggestion(given, known, listing=False))
    if isinstance(detail["input"], dict):  # a check over several keys, whose message names them
        return Problem(where, key, f"{message}.")
    return Problem(where, key, f"{message}, got {detail['input']!r}.")


def _suggestion(word: str, known: list[str], *, listing: bool = True) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"Did you mean '{close[0]}'?"
    return f"Known here: {', '.join(sorted(known))}." if listing and known else ""


def _walk(model: type[BaseModel], location: tuple[int | str, ...]) -> tuple[KeyPath, type[BaseModel] | None]:
    """Follow an error's location: the user's key path (no union tags, no indices), and the model that owns its end."""
    path: list[str] = []
    owner: type[BaseModel] | None = model
    candidates = [model]
    for part in location:
        tagged = [candidate for candidate in candidates if len(candidates) > 1 and _tag(candidate) == part]
        if tagged:
            candidates = tagged
            continue
        if isinstance(part, int):
            continue
        owner = candidates[0] if len(candidates) == 1 else None
        path.append(part)
        field = owner.model_fields.get(part) if owner else None
        candidates = _models(field.annotation) if field else []
    return tuple(path), owner


def _tag(model: type[BaseModel]) -> str | None:
    kind = model.model_fields.get("kind")
    values = typing.get_args(kind.annotation) if kind and typing.get_origin(kind.annotation) is Literal else ()
    return str(values[0]) if values else None


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _models(typing.get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [model for part in typing.get_args(annotation) for model in _models(part)]
    return []
