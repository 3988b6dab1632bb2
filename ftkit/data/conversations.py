"""From examples to conversations: who says what."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ftkit.config.data import MessagesFormat, PromptCompletionFormat
from ftkit.config.format_string import columns_of, parse_format_string
from ftkit.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftkit.config.data import Format

Role = Literal["system", "user", "assistant"]

_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}

_TURN_KEYS: dict[str, dict[str, Literal["role", "content"]]] = {
    "openai": {"role": "role", "content": "content"},
    "sharegpt": {"from": "role", "value": "content"},
}
"""For each style, what the keys of a turn are in a `Message`. A turn with any other key is refused."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str


def to_messages(example: Mapping[str, Any], form: Format) -> list[Message]:
    """Turn an example into a conversation.

    Raises:
        DataError: a column is missing or is not what the format expects, or an assistant turn is blank.
    """
    match form:
        case PromptCompletionFormat():
            messages = [*to_prompt(example, form), Message("assistant", _fill(form.completion, example, "completion"))]
        case MessagesFormat():
            messages = _read_turns(example, form)
    if any(message.role == "assistant" and not message.content.strip() for message in messages):
        raise DataError(
            "an assistant turn is blank",
            meaning="the model would be trained to end its turn at once",
            fix="correct data.format, or remove this example",
        )
    return messages


def to_prompt(example: Mapping[str, Any], form: PromptCompletionFormat) -> list[Message]:
    """Return the user's turn alone, for the model to answer."""
    return [Message("user", _fill(form.prompt, example, "prompt"))]


def _fill(template: str, example: Mapping[str, Any], key: str) -> str:
    columns = columns_of(template)
    missing = [name for name in columns if name not in example]
    if missing:
        raise DataError(
            f"data.format.{key} uses columns that the data does not have: {', '.join(missing)}",
            meaning=f"the data has: {', '.join(sorted(example))}",
            fix="correct data.format in the recipe",
        )
    if columns and all(example[name] is None for name in columns):
        raise DataError(
            f"all columns of data.format.{key} are null: {', '.join(columns)}",
            fix="correct data.format, or remove this example",
        )
    pieces = parse_format_string(template)
    return "".join(literal + ("" if column is None else _text(example[column], column)) for literal, column in pieces)


def _text(value: object, column: str) -> str:
    """Return the text of a column: a null's is empty, as in Alpaca's `input`."""
    if value is None:
        return ""
    if isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    raise DataError(
        f"column '{column}' is neither text nor a number: {str(value)[:80]}",
        meaning=f"the model would be trained on Python's notation of a {type(value).__name__}",
        fix="turn the column into text, or leave it out of data.format",
    )


def _read_turns(example: Mapping[str, Any], form: MessagesFormat) -> list[Message]:
    turns = example.get(form.column)
    if not isinstance(turns, list) or not turns:
        raise DataError(
            f"column '{form.column}' is not a list of turns",
            meaning=f"the data has: {', '.join(sorted(example))}",
            fix="set data.format.column to the column with the conversation",
        )
    messages = []
    for number, turn in enumerate(turns, start=1):
        try:
            messages.append(_read_turn(turn, form.style))
        except DataError as error:
            raise DataError(f"turn {number}: {error.what}", meaning=error.meaning, fix=error.fix) from error
    return messages


def _read_turn(turn: object, style: str) -> Message:
    known = _TURN_KEYS[style]
    if not isinstance(turn, dict):
        raise DataError(f"not a mapping with {' and '.join(known)}: {str(turn)[:80]}", fix="correct the data")
    # A key without a value says nothing: tables give all turns the keys of each.
    unknown = [str(key) for key, value in turn.items() if key not in known and value not in (None, "", [], {})]
    if unknown:
        raise DataError(
            f"a turn has keys that are not supported: {', '.join(unknown)}",
            meaning=f"style '{style}' reads {' and '.join(known)}; leaving the rest out would change what is trained",
            fix="correct data.format.style, or remove these keys or the examples that have them",
        )
    values = {field: turn.get(key) for key, field in known.items()}
    role, content = _ROLES.get(str(values["role"])), values["content"]
    if role is None:
        raise DataError(
            f"a turn's role is {str(values['role'])[:80]!r}",
            meaning=f"known roles: {', '.join(_ROLES)}",
            fix="correct data.format.style, or the data",
        )
    if not isinstance(content, str):
        raise DataError(
            f"the content of a turn of {role} is not text: {str(content)[:80]}",
            fix="correct data.format.style, or the data",
        )
    return Message(role, content)
