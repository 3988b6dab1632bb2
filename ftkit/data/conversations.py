"""From examples to conversations: who says what."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ftkit.errors import DataError
from ftkit.specs.data import MessagesFormat, PromptCompletionFormat

if TYPE_CHECKING:
    from ftkit.data.sources import Example
    from ftkit.specs.data import Format

Role = Literal["system", "user", "assistant"]

_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str


def to_messages(example: Example, form: Format) -> list[Message]:
    """Turn an example into a conversation.

    Raises:
        DataError: a column is missing, or is not what the format expects.
    """
    match form:
        case PromptCompletionFormat():
            return [
                Message("user", _fill(form.prompt, example)),
                Message("assistant", _fill(form.completion, example)),
            ]
        case MessagesFormat():
            return _read_turns(example, form)


def to_prompt(example: Example, form: PromptCompletionFormat) -> list[Message]:
    """Return the user's turn alone, for the model to answer."""
    return [Message("user", _fill(form.prompt, example))]


def _fill(template: str, example: Example) -> str:
    columns = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    missing = [name for name in columns if name not in example]
    if missing:
        raise DataError(
            f"the format names columns that the data has not: {', '.join(missing)}",
            meaning=f"the data has: {', '.join(sorted(example))}",
            fix="correct data.format in the recipe",
        )
    return template.format_map(example)


def _read_turns(example: Example, form: MessagesFormat) -> list[Message]:
    turns = example.get(form.column)
    if not isinstance(turns, list) or not turns:
        raise DataError(
            f"column '{form.column}' holds no conversation",
            meaning=f"the data has: {', '.join(sorted(example))}",
            fix="set data.format.column to the column that holds a list of turns",
        )
    role_key, text_key = ("role", "content") if form.style == "openai" else ("from", "value")
    return [_read_turn(turn, role_key, text_key) for turn in turns]


def _read_turn(turn: Any, role_key: str, text_key: str) -> Message:
    role = _ROLES.get(str(turn.get(role_key))) if isinstance(turn, dict) else None
    text = turn.get(text_key) if isinstance(turn, dict) else None
    if role is None or not isinstance(text, str):
        raise DataError(
            f"a turn is not of the form {{'{role_key}': …, '{text_key}': …}}: {str(turn)[:80]}",
            meaning=f"known roles: {', '.join(_ROLES)}",
            fix="correct data.format.style, or the data",
        )
    return Message(role, text)
