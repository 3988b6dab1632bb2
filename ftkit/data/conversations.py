"""Conversations and plain texts: the parsed form of a row."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from ftkit.config.data import Role
from ftkit.errors import DataError

JsonObject = Mapping[str, Any]
_MAX_SHOWN_ROLES = 8
_SHORT_ID = 9
"""Length of a tool call id for templates that require it (Mistral's)."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that an assistant turn makes; several in one turn are parallel calls."""

    name: str
    arguments: JsonObject
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        reasoning: reasoning of an assistant turn; templates call it `reasoning_content` or `thinking`.
        name: name of the speaker, or of the tool that returned this result.
        tool_call_id: the call whose result this is.
        trained: whether the turn counts in the loss, if the data says so.
    """

    role: Role
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    trained: bool | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, and the tools that the assistant may call.

    Attributes:
        tools: JSON schemas as OpenAI's API takes them: `{"type": "function", "function": {...}}`.
        num_prompt: number of turns that are the prompt, if the data has prompts and completions.
    """

    messages: tuple[Message, ...]
    tools: tuple[JsonObject, ...] = ()
    num_prompt: int | None = None


@dataclass(frozen=True, slots=True)
class PlainText:
    """A text without turns, for continued pretraining."""

    text: str


Example = Conversation | PlainText


def texts_of(example: Example) -> list[str]:
    """Return the texts of an example."""
    if isinstance(example, PlainText):
        return [example.text]
    return [message.content for message in example.messages]


def trained_turns(conversation: Conversation, train_on: str | list[Any]) -> list[int]:
    """Return the indices of the trained turns.

    Raises:
        DataError: no turn is trained.
    """
    messages, num_prompt = conversation.messages, conversation.num_prompt
    assistant = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if train_on == "completion" and num_prompt is None:
        raise DataError(
            "data.train_on is 'completion', but the data has no prompts and completions",
            fix="set data.train_on to 'assistant' or 'last'",
        )
    match train_on:
        case "last":
            chosen = set(assistant[-1:])
        case "completion":
            chosen = {index for index in assistant if index >= (num_prompt or 0)}
        case list():
            chosen = {index for index, message in enumerate(messages) if message.role in train_on}
        case _:
            chosen = set(assistant)
    trained = [
        index
        for index, message in enumerate(messages)
        if (index in chosen if message.trained is None else message.trained)
    ]
    if not trained:
        raise DataError(
            f"nothing to train on in the turns {', '.join(message.role for message in messages[:_MAX_SHOWN_ROLES])}",
            meaning="data.train_on, or the weights of the turns, exclude all turns",
            fix="correct data.format or data.train_on, or skip these examples",
        )
    return trained


def with_short_ids(conversation: Conversation) -> Conversation:
    """Give all tool calls ids of nine letters or digits, and the results the ids of their calls, in order."""
    numbers = count()
    waiting: list[str] = []
    messages = []
    for message in conversation.messages:
        calls = tuple(replace(call, id=_short_id(call.id or f"call {next(numbers)}")) for call in message.tool_calls)
        waiting += [str(call.id) for call in calls]
        result = message.tool_call_id
        if message.role == "tool":
            result = _short_id(result) if result else next(iter(waiting), None)
            waiting = [each for each in waiting if each != result]
        messages.append(replace(message, tool_calls=calls, tool_call_id=result))
    return replace(conversation, messages=tuple(messages))


def _short_id(text: str) -> str:
    is_short = len(text) == _SHORT_ID and text.isalnum()
    return text if is_short else hashlib.sha256(text.encode()).hexdigest()[:_SHORT_ID]
